// The checker of the flag protocol: a model of all ranks' kernels whose agents run in any order.
//
// Who.   A rank has a stream: kernels that run one after the other (layer_model.h has the launches
//        of a call), and for a while one that runs beside them. A kernel has CTAs, a CTA has
//        agents: warps that act in step, one for each role (load, pull, math, store, push; or just
//        one mover). An agent has a program: a list of steps (program.h). Programs are built from
//        the schedule that the kernels walk (src/schedule), so a change there is a change here.
//
// What.  Memory is a set of data (memory_model.h), each as small as the smallest store to it: a
//        row's block of channels, a slot's, a unit of 16 rows of a or dg, a pull list, a header, a
//        stage of shared memory. A datum holds a tag: what it is, of which call. Counters, signals
//        and mbarriers are not data; agents learn from them.
//
// When.  Nothing has a time. Every access is a point on a timeline of its agent, and everybody has
//        a clock: which points of whom it knows to be past. Clocks grow by
//          - the end of a kernel, for later kernels of the rank's stream;
//          - red.release, then ld.acquire of a counter that has reached its target;
//          - st.release.sys, then ld.acquire.sys of a signal;
//          - arrivals on an mbarrier, and copies that complete on it, then a wait for the phase.
//        A copy is a point on a timeline of its own: a bulk store is known once its agent has
//        waited for the group in full, what it reads once it has waited with .read, a load once
//        somebody has waited on its barrier. So nothing has to be delayed to be caught: a reader
//        that does not know of the write is wrong, however lucky its timing.
//
// Rules. A read needs: the write is known; the datum has the tag that the plan says; and for a copy
//          - written by ordinary stores: the writer has fenced (fence.proxy.async) in between, and
//            the reader knows of it;
//          - in global memory: the reader has fenced since it came to know of the write, unless it
//            is a kernel's end that told it (same rank), or the same CTA's copies wrote it.
//          Of the slots, which peers fill by ordinary stores, the reader's fence is enough.
//        A write needs: the last write and all reads since are known; the tag is new; where a copy
//        fills shared memory that its agent has read by ordinary loads: a fence in between. An
//        agent needs, at its end: its bulk stores are complete. A parity wait needs: it ends in the
//        phase that was meant. A plain load of a counter needs: nobody takes from it in the same
//        kernel. The model asks for both fences where PTX would be content with one, wherever the
//        protocol has both. What leaves a rank in a backward call needs: its agent knows nothing of
//        that call's weight gradients, of any rank, so no order of kernels and no flag has made it
//        wait for them.
//
// Order. Two ways (explore.h). At random: agents of different speeds take bursts of steps. Or all
//        of them: depth first, states known by a fingerprint. Steps whose outcome does not depend
//        on when they are taken, and on which nobody's outcome depends, are taken at once: data,
//        fences, mbarriers, waits for a counter that only grows. What is left are takes from the
//        list of pulls, additions to counters and looks at them (these matter within a rank, and
//        one rank at a time is enough) and signals (these matter to all). Some steps an agent may
//        leave to a later kernel, for a reason that the model does not have (its CTA is done): both
//        are tried. Whether it will is decided at once, because nobody else learns of it; and of a
//        rank that will stay until peers have signalled, its own steps come last.
//
// Faults. layer_model.h has a list of mistakes that can be built into the programs. Each must be
//        found (faults_test.cc), and what is found is told with its last steps.
//
// What this proves and what it does not: docs/checker.md.
#pragma once

#include "schedule/explore.h"
#include "schedule/layer_model.h"

// What an agent does, as a list of steps. An agent is a thread or a warp that acts in step; its
// roles' programs are written in the files that layer_builder.h names.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "schedule/memory_model.h"

namespace megamoe::checker {

enum class OpKind : std::uint8_t {
  read,          ///< ordinary load of datum `object`, which must hold `tag`
  write,         ///< ordinary store of `tag` to datum `object`; `other` 1: in shared memory
  fence,         ///< fence.proxy.async.global
  fence_shared,  ///< fence.proxy.async.shared::cta
  // Loads: load_reads, then the load_write that they belong to.
  load_read,   ///< a copy reads datum `object`, which must hold `tag`
  load_write,  ///< into datum `object` in shared memory, completes on barrier `other`
  // Bulk groups of the agent.
  store,       ///< a copy reads datum `object` (shared memory) and writes `tag` to datum `other`
  group_read,  ///< a group (of wgmma) reads datum `object`
  commit,
  wait_complete,  ///< cp.async.bulk.wait_group `amount`
  wait_read,      ///< cp.async.bulk.wait_group.read `amount`, wgmma.wait_group `amount`
  // mbarriers.
  arrive,            ///< on barrier `object`
  arrive_expecting,  ///< on barrier `object`, and announces `amount` loads
  await_barrier,     ///< until phase `amount` of barrier `object` is complete
  // Counters in global memory, reach: the GPU.
  start_counter,  ///< plain store of `amount` to counter `object`
  add,            ///< red.release of `amount` to counter `object`
  await_counter,  ///< ld.acquire of counter `object` until it is `amount`; not if look `other` saw
                  ///< it
  look,  ///< ld.acquire of counter `object` once; notes in look `other` whether it is `amount`
  look_at_all,    ///< the same, for all that the agent will ever wait for
  fence_looks,    ///< fence, unless one has covered everything; forgets the looks
  take,           ///< atomicAdd of 1 to counter `object`; its value goes to the agent's registers
  take_or_leave,  ///< the same, or kNothingTaken: its CTA's loads may be over at any time
  read_counter,   ///< plain load of counter `object` into the agent's registers
  // Signals between ranks, and the call.
  begin_call,    ///< the rank's epoch becomes `amount`
  send_signal,   ///< st.release.sys of the rank's epoch to signal `object`
  await_signal,  ///< ld.acquire.sys of signal `object` until its epoch is at least `amount`
  // Of all ranks, from signal `object` on, until they are of epoch `amount`; or the agent ends
  // before, which may be decided at the first of the two.
  poll_later,
  poll_signals,
  judge_header,  ///< read, and fail the call if the header says so
  end_if_failed,
  expand,  ///< ask the kernel for the next steps of what the agent does: Does{amount}
};

struct Op {
  OpKind kind = OpKind::read;
  std::uint32_t object = 0;
  std::uint32_t other = 0;
  std::uint32_t amount = 0;
  std::uint64_t tag = 0;
};

using Program = std::vector<Op>;

/// What agents do that decide as they go.
enum class Does : std::uint32_t { pull, reduce, reduce_rest };

/// In the registers of who has left a take.
inline constexpr std::uint32_t kNothingTaken = ~std::uint32_t{0};

/// What a header's tag says about its rank's call.
inline constexpr std::uint64_t kBadCall = 1;

struct AgentProgram {
  std::string role;
  std::uint32_t cta = 0;  ///< of the rank
  Program steps;
};

struct Kernel {
  std::string name;
  std::vector<AgentProgram> agents;
  std::vector<std::uint32_t> arrivals;  ///< on each of a CTA's barriers; 1 where there is no number
  /// The rank's kernel that starts with this one and runs beside it and those that follow, in CTAs
  /// of its own, until the stream comes to its number, where it waits for its end.
  std::optional<std::uint32_t> forks;
  /// Kernels, of all ranks, for which nothing may wait that is written or signalled here.
  std::vector<std::uint32_t> must_not_await;
};

/// Registers of the roles that decide as they go.
struct Registers {
  std::uint32_t taken = 0;  ///< by the last `take`
  std::int64_t ahead = -1;  ///< the pull that is looked up
  std::uint32_t pass = 0;
  std::uint32_t num_taken = 0;
  std::uint32_t num_looked_up = 0;
  std::uint32_t num_chunks = 0;     ///< loads begun
  std::uint32_t num_stored = 0;     ///< chunks
  std::int64_t pending_chunk = -1;  ///< loaded, not stored: pull * chunks a row + chunk
  std::uint32_t pending_pass = 0;
  std::int64_t stored_chunk = -1;  ///< stored in the newest group
  std::uint32_t stored_pass = 0;
  bool started = false;
  std::uint32_t num_parts = 0;  ///< of slots, that a reduction has loaded
  // Looks at counters.
  std::uint32_t looks = 0;
  bool saw_all = false;
  bool fenced_all = false;
};

/// How a rank stands, as the kernels of its stream leave it to each other.
struct RankControl {
  std::uint32_t epoch = 0;
  bool call_failed = false;
  bool failed_for_good = false;
};

/// Where kernels come from.
class KernelSource {
 public:
  virtual ~KernelSource() = default;
  /// The kernel that rank `rank` launches as its `index`-th, null if there is none.
  virtual std::shared_ptr<const Kernel> kernel(std::uint32_t rank, std::uint32_t index,
                                               const RankControl& control) const = 0;
  /// The next steps of an agent that asks.
  virtual void expand(std::uint32_t rank, std::uint32_t index, std::uint32_t cta, Does what,
                      Registers& registers, Program& steps) const = 0;
};

}  // namespace megamoe::checker

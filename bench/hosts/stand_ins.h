// Hosts that are processes of this machine.
#pragma once

namespace megamoe::bench {

/// This program again, twice: stand-in hosts with a GPU each, which see each other by NCCL's
/// sockets on the loopback interface alone. What main() is to return.
int run_stand_ins(int argc, char** argv);

}  // namespace megamoe::bench

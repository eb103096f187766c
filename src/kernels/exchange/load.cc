// Every kernel of the exchange, each loaded by the unit that holds it.
#include "kernels/exchange/exchange.h"

namespace megamoe::gpu {

void load_count_kernels();
void load_enter_kernel();
void load_list_kernels();
void load_split_kernel();
void load_stage_kernel();
void load_meet_kernels();
void load_pull_kernels();
void load_bulk_pull_kernel();
void load_order_kernel();
void load_push_kernels();
void load_reduce_kernels();

void load_exchange_kernels() {
  load_count_kernels();
  load_enter_kernel();
  load_list_kernels();
  load_split_kernel();
  load_stage_kernel();
  load_meet_kernels();
  load_pull_kernels();
  load_bulk_pull_kernel();
  load_order_kernel();
  load_push_kernels();
  load_reduce_kernels();
}

}  // namespace megamoe::gpu

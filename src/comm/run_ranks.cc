#include "comm/run_ranks.h"

#include <exception>
#include <mutex>
#include <string>
#include <thread>

namespace megamoe {

void run_ranks_of(std::vector<std::unique_ptr<Communicator>> communicators,
                  const std::function<void(Communicator&)>& rank_main) {
  const auto num_ranks = static_cast<int>(communicators.size());
  std::mutex mutex;
  std::exception_ptr first_error;
  const auto run_rank = [&](int rank) {
    try {
      rank_main(*communicators[rank]);
    } catch (...) {
      std::string reason = "an unknown exception";
      {
        const std::lock_guard lock(mutex);
        if (!first_error) first_error = std::current_exception();
      }
      try {
        throw;
      } catch (const std::exception& error) {
        reason = error.what();
      } catch (...) {
        // Keeps the reason above.
      }
      communicators[rank]->abort(reason);
    }
    communicators[rank].reset();
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < num_ranks; ++rank) threads.emplace_back(run_rank, rank);
  run_rank(0);
  for (std::thread& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
}

void run_ranks(int num_ranks, const std::function<void(Communicator&)>& rank_main) {
  run_ranks_of(make_thread_communicators(num_ranks), rank_main);
}

}  // namespace megamoe

#include "threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace baton {
namespace {

constexpr int MOST_SHARES = 64;  // more threads than that share shares
constexpr int SPINS = 2000;  // some 50 us: longer than the gap between two ops of a step, shorter than a time slice

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  void run(int64_t num_items, int num_helpers, Piece piece, void* context) {
    std::lock_guard<std::mutex> one_call(call_);
    for (; started_ < num_helpers; ++started_) std::thread([this, id = started_] { serve(id); }).detach();
    piece_ = piece;
    context_ = context;
    wanted_ = num_helpers;
    num_shares_ = std::min(num_helpers + 1, MOST_SHARES);
    for (int s = 0; s < num_shares_; ++s) {
      shares_[s].next.store(num_items * s / num_shares_, std::memory_order_relaxed);
      shares_[s].end = num_items * (s + 1) / num_shares_;
    }
    open_.store(++generation_);  // pairs with the check in `join`: sequentially consistent, both
    if (parked_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    take(0);
    open_.store(0);
    for (int spins = 0; inside_.load() > 0; ++spins) spins < SPINS ? pause() : std::this_thread::yield();
  }

 private:
  // A run of neighbouring pieces for each thread, which then reads memory from front to back; who is done with its own
  // helps the others.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  void take(int thread) {
    for (int turn = 0; turn < num_shares_; ++turn) {
      Share& share = shares_[(thread + turn) % num_shares_];
      for (int64_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) piece_(context_, i);
    }
  }

  [[noreturn]] void serve(int id) {
    for (uint64_t seen = 0;;) {
      seen = wait_open(seen);
      join(id, seen);
    }
  }

  // Once inside, the caller waits for us, so the call's fields stay as they are. Whoever comes after the caller
  // closed the door sees it and leaves without a look at them.
  void join(int id, uint64_t generation) {
    inside_.fetch_add(1);
    if (open_.load() == generation && id < wanted_) take(id + 1);
    inside_.fetch_sub(1);
  }

  uint64_t wait_open(uint64_t seen) {
    for (int spins = 0; spins < SPINS; ++spins) {
      const uint64_t now = open_.load(std::memory_order_acquire);
      if (now != 0 && now != seen) return now;
      pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    parked_.fetch_add(1);
    uint64_t now = 0;
    wake_.wait(lock, [&] { return (now = open_.load()) != 0 && now != seen; });
    parked_.fetch_sub(1);
    return now;
  }

  std::mutex call_, mutex_;
  std::condition_variable wake_;
  Share shares_[MOST_SHARES];
  alignas(64) std::atomic<uint64_t> open_{0};  // number of the call that takes helpers, 0 = none
  alignas(64) std::atomic<int> inside_{0};
  std::atomic<int> parked_{0};
  Piece piece_ = nullptr;
  void* context_ = nullptr;
  uint64_t generation_ = 0;
  int num_shares_ = 0, wanted_ = 0, started_ = 0;
};

}  // namespace

void run_pieces(int64_t num_items, int num_threads, Piece piece, void* context) {
  // Never destroyed: a helper may still wait in it when the process ends.
  static Team* team = new Team;
  const int64_t most = num_items - 1;
  team->run(num_items, static_cast<int>(num_threads - 1 < most ? num_threads - 1 : most), piece, context);
}

}  // namespace baton

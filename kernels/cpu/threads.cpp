#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace baton {
namespace {

class Helpers {
 public:
  void run(int64_t num_items, int num_helpers, const std::function<void(int64_t)>& body) {
    std::lock_guard<std::mutex> one_call(call_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (; started_ < num_helpers; ++started_) std::thread([this] { serve(); }).detach();
      next_ = 0;
      num_items_ = num_items;
      body_ = &body;
      wanted_ = num_helpers;
      busy_ = 0;
    }
    wake_.notify_all();
    take(body, num_items);
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;  // a helper that wakes too late finds nothing to do
    done_.wait(lock, [this] { return busy_ == 0; });
    body_ = nullptr;
  }

 private:
  void take(const std::function<void(int64_t)>& body, int64_t num_items) {
    for (int64_t i; (i = next_.fetch_add(1)) < num_items;) body(i);
  }

  [[noreturn]] void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return wanted_ > 0; });
      --wanted_;
      ++busy_;
      const auto* body = body_;
      const int64_t num_items = num_items_;
      lock.unlock();
      take(*body, num_items);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex call_, mutex_;
  std::condition_variable wake_, done_;
  std::atomic<int64_t> next_{0};
  const std::function<void(int64_t)>* body_ = nullptr;
  int64_t num_items_ = 0;
  int started_ = 0, wanted_ = 0, busy_ = 0;
};

}  // namespace

void parallel_for(int64_t num_items, int num_threads, const std::function<void(int64_t)>& body) {
  if (num_threads <= 1 || num_items <= 1) {
    for (int64_t i = 0; i < num_items; ++i) body(i);
    return;
  }
  // Never destroyed: a helper may still sleep in it when the process ends.
  static Helpers* helpers = new Helpers;
  const int64_t most = num_items - 1;
  helpers->run(num_items, static_cast<int>(num_threads - 1 < most ? num_threads - 1 : most), body);
}

}  // namespace baton

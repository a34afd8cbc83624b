// Runs a kernel's blocks one after the other. The threads of a block take turns; each runs until it has to wait.
#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

dim3 threadIdx, blockIdx, gridDim;

namespace hvd_sparse {
namespace {

constexpr size_t kStack = 96 * 1024;
constexpr unsigned kWarp = 32;

enum class Waits { kNot, kForWarp, kForBlock, kIsDone };

using Place = void* [5];  // for __builtin_setjmp, which avoids the two system calls of swapcontext

struct Thread {
  Place place;
  ucontext_t begin;
  std::unique_ptr<char[]> stack;  // null if the thread has never run
  Waits waits = Waits::kNot;
};

struct Block {
  std::vector<Thread> threads;
  unsigned size = 0;
  unsigned running = 0;
  std::vector<uint64_t> brought;    // values of waiting threads
  std::vector<uint64_t> warp_met;   // values of the warps' last barriers
  std::vector<uint64_t> block_met;  // values of the block's last barrier
  Place scheduler;
  const std::function<void()>* kernel = nullptr;
};

Block& TheBlock() {
  static Block block;
  return block;
}

[[noreturn]] __attribute__((noinline)) void GoOn(Place& place) { __builtin_longjmp(place, 1); }

// Continues at `to`. Returns when another context continues at `from`.
__attribute__((noinline)) void Switch(Place& from, Place& to) {
  if (__builtin_setjmp(from) == 0) GoOn(to);
}

// Runs a thread of consecutive blocks.
void Enter() {
  Block& block = TheBlock();
  for (;;) {
    Thread& thread = block.threads[block.running];
    (*block.kernel)();
    thread.waits = Waits::kIsDone;
    Switch(thread.place, block.scheduler);
  }
}

__attribute__((noinline)) void Begin(Thread& thread, Place& scheduler) {
  thread.stack.reset(new char[kStack]);
  getcontext(&thread.begin);
  thread.begin.uc_stack.ss_sp = thread.stack.get();
  thread.begin.uc_stack.ss_size = kStack;
  makecontext(&thread.begin, Enter, 0);
  if (__builtin_setjmp(scheduler) == 0) setcontext(&thread.begin);
}

void Wait(Waits waits, uint64_t value) {
  Block& block = TheBlock();
  Thread& thread = block.threads[block.running];
  block.brought[block.running] = value;
  thread.waits = waits;
  Switch(thread.place, block.scheduler);
}

// Releases threads [begin, end) if all of them wait in the same way. A thread that has returned is an error.
bool Release(Block& block, unsigned begin, unsigned end, Waits waits, std::vector<uint64_t>* met) {
  for (unsigned t = begin; t < end; ++t) {
    if (block.threads[t].waits != waits) return false;
  }
  for (unsigned t = begin; t < end; ++t) {
    (*met)[t] = block.brought[t];
    block.threads[t].waits = Waits::kNot;
  }
  return true;
}

bool ReleaseAny(Block& block) {
  bool any = Release(block, 0, block.size, Waits::kForBlock, &block.block_met);
  for (unsigned begin = 0; begin + kWarp <= block.size; begin += kWarp) {
    any |= Release(block, begin, begin + kWarp, Waits::kForWarp, &block.warp_met);
  }
  return any;
}

// Runs each thread that does not wait once, and returns their number.
unsigned RunThreads(Block& block) {
  unsigned ran = 0;
  for (unsigned t = 0; t < block.size; ++t) {
    if (block.threads[t].waits != Waits::kNot) continue;
    block.running = t;
    threadIdx.x = t;
    Thread& thread = block.threads[t];
    if (thread.stack == nullptr) {
      Begin(thread, block.scheduler);
    } else {
      Switch(block.scheduler, thread.place);
    }
    ++ran;
  }
  return ran;
}

void RunBlock(Block& block) {
  for (unsigned t = 0; t < block.size; ++t) block.threads[t].waits = Waits::kNot;
  while (RunThreads(block) > 0 || ReleaseAny(block)) {
  }
  for (unsigned t = 0; t < block.size; ++t) {
    if (block.threads[t].waits == Waits::kIsDone) continue;
    std::printf("thread %u waits for others that never come\n", t);
    std::abort();
  }
}

}  // namespace

cudaError_t RunOnHost(dim3 blocks, int threads, cudaStream_t, const std::function<void()>& kernel) {
  Block& block = TheBlock();
  block.size = static_cast<unsigned>(threads);
  if (block.threads.size() < block.size) block.threads = std::vector<Thread>(block.size);
  block.brought.assign(block.size, 0);
  block.warp_met.assign(block.size, 0);
  block.block_met.assign(block.size, 0);
  block.kernel = &kernel;
  gridDim = blocks;
  for (blockIdx.y = 0; blockIdx.y < blocks.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < blocks.x; ++blockIdx.x) RunBlock(block);
  }
  return cudaSuccess;
}

uint64_t* MeetBlock(uint64_t value) {
  Wait(Waits::kForBlock, value);
  return TheBlock().block_met.data();
}

uint64_t* MeetWarp(uint64_t value) {
  Wait(Waits::kForWarp, value);
  return TheBlock().warp_met.data() + threadIdx.x / kWarp * kWarp;
}

}  // namespace hvd_sparse

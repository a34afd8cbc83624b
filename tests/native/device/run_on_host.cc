// Runs a kernel's blocks one after the other, and the threads of a block in turn, each from one wait to the next.
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

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Waits waits = Waits::kNot;
};

struct Block {
  std::vector<Thread> threads;
  unsigned size = 0;
  unsigned running = 0;
  std::vector<uint64_t> brought;    // of those who wait
  std::vector<uint64_t> warp_met;   // what the warps' last meetings were told
  std::vector<uint64_t> block_met;  // the block's
  ucontext_t scheduler;
  const std::function<void()>* kernel = nullptr;
};

Block& TheBlock() {
  static Block block;
  return block;
}

void Enter() {
  Block& block = TheBlock();
  (*block.kernel)();
  block.threads[block.running].waits = Waits::kIsDone;
}

void Wait(Waits waits, uint64_t value) {
  Block& block = TheBlock();
  Thread& thread = block.threads[block.running];
  block.brought[block.running] = value;
  thread.waits = waits;
  swapcontext(&thread.context, &block.scheduler);
}

// Lets [begin, end) go on if all of them wait alike; what has returned cannot be waited for.
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

// One turn for every thread that does not wait; returns how many there were.
unsigned RunThreads(Block& block) {
  unsigned ran = 0;
  for (unsigned t = 0; t < block.size; ++t) {
    if (block.threads[t].waits != Waits::kNot) continue;
    block.running = t;
    threadIdx.x = t;
    swapcontext(&block.scheduler, &block.threads[t].context);
    ++ran;
  }
  return ran;
}

// Not inlined: getcontext may return twice, as far as the compiler knows.
__attribute__((noinline)) void Prepare(Thread& thread, ucontext_t* scheduler) {
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.get();
  thread.context.uc_stack.ss_size = kStack;
  thread.context.uc_link = scheduler;
  makecontext(&thread.context, Enter, 0);
  thread.waits = Waits::kNot;
}

void RunBlock(Block& block) {
  for (unsigned t = 0; t < block.size; ++t) Prepare(block.threads[t], &block.scheduler);
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

// Keeps denormal numbers on the calling thread.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace hvd_sparse {

// While this object lives, the thread does not flush denormals to zero. A host may have set that for some threads only,
// as torch.set_flush_denormal does, but a sum must have the same bits on every thread and every rank.
class KeepDenormals {
 public:
  KeepDenormals() : flushes_(Control() & kFlush) {
    if (flushes_ != 0) SetControl(Control() & ~kFlush);
  }
  ~KeepDenormals() {
    if (flushes_ != 0) SetControl(Control() | flushes_);
  }
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;

 private:
#if defined(__SSE2__)
  using Word = uint32_t;
  static constexpr Word kFlush = 0x8040;  // of MXCSR: results (FTZ) and operands (DAZ)
  static Word Control() { return _mm_getcsr(); }
  static void SetControl(Word control) { _mm_setcsr(control); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kFlush = Word{1} << 24;  // of FPCR: FZ
  static Word Control() {
    Word control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void SetControl(Word control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
#else
  using Word = uint32_t;
  static constexpr Word kFlush = 0;
  static Word Control() { return 0; }
  static void SetControl(Word) {}
#endif

  const Word flushes_;
};

}  // namespace hvd_sparse

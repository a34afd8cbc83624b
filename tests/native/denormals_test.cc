#include "denormals.h"

#include "dtype.h"
#include "expect.h"

#if defined(__SSE2__)

namespace hvd_sparse {
namespace {

constexpr unsigned kFlush = 0x8040;  // FTZ and DAZ

// Twice the smallest denormal, as bits; computed when the function is called.
uint32_t Doubled() {
  volatile float smallest = BitsToFloat(1);
  volatile float sum = smallest + smallest;
  return FloatToBits(sum);
}

TEST(DenormalsAreKeptAndTheSettingIsRestored) {
  const unsigned before = _mm_getcsr();
  for (const unsigned flush : {0u, 0x8000u, 0x0040u, kFlush}) {
    _mm_setcsr((before & ~kFlush) | flush);
    EXPECT_EQ(flush == 0 ? 2u : 0u, Doubled(), flush);
    {
      const KeepDenormals keep;
      EXPECT_EQ(2u, Doubled(), flush);
      {
        const KeepDenormals inner;
        EXPECT_EQ(2u, Doubled(), flush);
      }
      EXPECT_EQ(2u, Doubled(), flush);
    }
    EXPECT_EQ(flush, _mm_getcsr() & kFlush, "restored");
  }
  _mm_setcsr(before);
}

}  // namespace
}  // namespace hvd_sparse

#else

TEST(NothingToKeep) { EXPECT(true, ""); }

#endif

#include "checksum.h"

#include <random>
#include <string>

#include "expect.h"
#include "wire.h"

namespace hvd_sparse {
namespace {

Bytes DrawBytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

TEST(MatchesPublishedValues) {
  const std::pair<std::string, uint32_t> published[] = {
      {"", 0u},
      {"a", 0xE8B7BE43u},
      {"123456789", 0xCBF43926u},
      {"The quick brown fox jumps over the lazy dog", 0x414FA339u},
      {std::string(32, '\0'), 0x190A55ADu},
      {std::string(32, '\xff'), 0xFF6CAB0Bu},
  };
  for (const auto& [text, crc] : published) EXPECT_EQ(crc, Crc32(text.data(), text.size()), "of \"" << text << "\"");
  EXPECT_EQ(0u, Crc32(nullptr, 0), "of nothing");
  EXPECT_EQ(0x12345678u, Crc32(nullptr, 0, 0x12345678u), "nothing more changes nothing");
}

TEST(MatchesOneBitAtATime) {
  for (size_t size = 0; size <= 200; ++size) {
    for (size_t offset = 0; offset < 9; ++offset) {
      const Exact bytes(DrawBytes(offset + size, 100 * size + offset));
      EXPECT_EQ(BitwiseCrc32(bytes.get() + offset, size), Crc32(bytes.get() + offset, size),
                "size " << size << ", offset " << offset);
    }
  }
  for (const size_t size : {65535, 65536, 65537, 1000003}) {
    const Exact bytes(DrawBytes(size, size));
    EXPECT_EQ(BitwiseCrc32(bytes.get(), size), Crc32(bytes.get(), size), "size " << size);
  }
}

TEST(ContinuesAnywhere) {
  const Exact bytes(DrawBytes(61, 1));
  const uint32_t whole = BitwiseCrc32(bytes.get(), 61);
  for (size_t first = 0; first <= 61; ++first) {
    for (size_t second = first; second <= 61; ++second) {
      uint32_t crc = Crc32(bytes.get(), first);
      crc = Crc32(bytes.get() + first, second - first, crc);
      crc = Crc32(bytes.get() + second, 61 - second, crc);
      EXPECT_EQ(whole, crc, "cut at " << first << " and " << second);
    }
  }
}

TEST(SeesEverySingleBit) {
  Bytes bytes = DrawBytes(40, 2);
  const uint32_t whole = Crc32(bytes.data(), bytes.size());
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    EXPECT(Crc32(bytes.data(), bytes.size()) != whole, "bit " << bit);
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
  }
}

}  // namespace
}  // namespace hvd_sparse

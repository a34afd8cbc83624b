// TEST, EXPECT and main for test executables of one file each. It replaces GoogleTest, because the tests must build on
// a machine with only Python, a compiler and make, without a network.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace expect {

struct Run {
  std::vector<std::pair<const char*, void (*)()>> tests;
  int64_t checks = 0;
  int64_t failures = 0;
};

inline Run& TheRun() {
  static Run run;
  return run;
}

inline bool Register(const char* name, void (*test)()) {
  TheRun().tests.emplace_back(name, test);
  return true;
}

inline void Fail(const char* file, int line, const std::string& text) {
  constexpr int64_t kShown = 20;  // of a loop over 65,536 patterns, the first few say it
  if (++TheRun().failures <= kShown) std::printf("%s:%d: %s\n", file, line, text.c_str());
}

template <typename T>
void Print(std::ostream& out, const T& value) {
  out.precision(std::numeric_limits<double>::max_digits10);
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<int64_t>(value);
  } else if constexpr (std::is_arithmetic_v<T>) {
    out << +value;
  } else {
    out << value;
  }
}

template <typename T>
void Print(std::ostream& out, const std::vector<T>& values) {
  out << values.size() << " of";
  for (size_t i = 0; i < values.size() && i < 16; ++i) Print(out << " ", values[i]);
}

template <typename Expected, typename Received>
bool Differ(const Expected& expected, const Received& received, const char* what, std::string* text) {
  if (expected == received) return false;
  std::ostringstream out;
  Print(out << what << " is ", received);
  Print(out << ", expected ", expected);
  *text = out.str();
  return true;
}

// Whether to run this case of a product: about one in `count`, the same in every run; with HVD_SPARSE_TESTS=all, which
// `make test-all` sets, each.
inline bool Chosen(uint64_t count) {
  static const char* const tier = std::getenv("HVD_SPARSE_TESTS");
  static const bool all = tier != nullptr && std::string(tier) == "all";
  static std::mt19937_64 random(7);
  return random() % count == 0 || all;
}

inline int RunTests() {
  for (const auto& [name, test] : TheRun().tests) {
    const int64_t before = TheRun().failures;
    test();
    std::printf("%s %s\n", TheRun().failures == before ? "ok    " : "FAILED", name);
  }
  const auto checks = static_cast<long long>(TheRun().checks);
  std::printf("%lld checks, %lld failed\n", checks, static_cast<long long>(TheRun().failures));
  return TheRun().failures == 0 && checks > 0 ? 0 : 1;
}

}  // namespace expect

#define TEST(name)                                                                      \
  static void name();                                                                   \
  [[maybe_unused]] static const bool registered_##name = expect::Register(#name, name); \
  static void name()

// `context` is what would follow `stream <<`; it is put together only on failure.
#define EXPECT(condition, context)                      \
  do {                                                  \
    ++expect::TheRun().checks;                          \
    if (!(condition)) {                                 \
      std::ostringstream text_;                         \
      text_ << "not " << #condition << "; " << context; \
      expect::Fail(__FILE__, __LINE__, text_.str());    \
    }                                                   \
  } while (false)

#define EXPECT_EQ(expected, received, context)                     \
  do {                                                             \
    std::string values_;                                           \
    ++expect::TheRun().checks;                                     \
    if (expect::Differ(expected, received, #received, &values_)) { \
      std::ostringstream text_;                                    \
      text_ << values_ << "; " << context;                         \
      expect::Fail(__FILE__, __LINE__, text_.str());               \
    }                                                              \
  } while (false)

// `received`, as many bytes as the vector `expected`; says the first that differs. One check, however many bytes.
#define EXPECT_BYTES(expected, received, context)                                                                      \
  do {                                                                                                                 \
    const auto differing_ = std::mismatch((expected).begin(), (expected).end(), received);                             \
    EXPECT(differing_.first == (expected).end(), "byte " << differing_.first - (expected).begin() << "; " << context); \
  } while (false)

// The kind of the Status that `call` returns; an error must say something, success nothing.
#define EXPECT_STATUS(expected_kind, call, context)                                                            \
  do {                                                                                                         \
    const ::hvd_sparse::Status status_ = (call);                                                               \
    EXPECT_EQ(expected_kind, status_.kind, "status says \"" << status_.message << "\"; " << context);          \
    EXPECT(status_.ok() == status_.message.empty(), "status says \"" << status_.message << "\"; " << context); \
  } while (false)

int main() { return expect::RunTests(); }

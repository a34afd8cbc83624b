// What the C functions for NumPy return: no exception leaves them.
#include "../../csrc/numpy/report.h"

#include <new>
#include <stdexcept>
#include <string>

#include "expect.h"

namespace hvd_sparse {
namespace {

template <typename Body>
void ExpectReport(int code, const std::string& text, const Body& body) {
  char message[kMessageBytes] = "untouched";
  EXPECT_EQ(code, Guarded(message, body), text);
  EXPECT_EQ(text, std::string(message), code);
}

TEST(StatusesAndExceptionsAreReported) {
  const std::string longest(kMessageBytes - 1, 'x');
  ExpectReport(0, "untouched", [] { return Status::Ok(); });
  ExpectReport(1, "wrong", [] { return Status::InvalidArgument("wrong"); });
  ExpectReport(1, longest, [&] { return Status::InvalidArgument(longest + "y"); });
  ExpectReport(2, "damaged", [] { return Status::CorruptPayload("damaged"); });
  ExpectReport(3, "out of memory", []() -> Status { throw std::bad_alloc(); });
  ExpectReport(4, "too long", []() -> Status { throw std::length_error("too long"); });
  ExpectReport(4, "unknown exception", []() -> Status { throw 1; });
}

}  // namespace
}  // namespace hvd_sparse

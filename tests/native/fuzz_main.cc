// Runs the fuzz target without libFuzzer: all files of a folder, then a given number of mutations of them, which are
// the same in every run.
//
//   fuzz_payload_test FOLDER MUTATIONS [SEED]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <vector>

#include "fuzz_payload.h"

namespace {

using Bytes = std::vector<uint8_t>;

std::vector<Bytes> ReadCorpus(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());  // the order in a folder is undefined
  std::vector<Bytes> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

void Run(const Bytes& input) {
  const std::unique_ptr<uint8_t[]> exact(new uint8_t[input.size()]);  // a read past the end is past the heap's
  std::copy(input.begin(), input.end(), exact.get());
  LLVMFuzzerTestOneInput(exact.get(), input.size());
}

class Mutator {
 public:
  Mutator(const std::vector<Bytes>& corpus, uint64_t seed) : corpus_(corpus), random_(seed) {
    for (const Bytes& input : corpus)
      (hvd_sparse::IsLarge(input.data(), input.size()) ? large_ : small_).push_back(input);
  }

  // One in kLargeEvery is made from a large input.
  Bytes Next() {
    const std::vector<Bytes>& from = Below(kLargeEvery) == 0 ? large_ : small_;
    Bytes bytes = from[Below(from.size())];
    for (size_t left = 1 + Below(4); left > 0; --left) Change(&bytes);
    return bytes;
  }

 private:
  static constexpr size_t kLargeEvery = 100;

  size_t Below(size_t limit) { return static_cast<size_t>(random_() % limit); }
  long Place(const Bytes& bytes) { return static_cast<long>(Below(bytes.size())); }

  void Change(Bytes* bytes) {
    constexpr uint8_t kEdges[] = {0, 1, 2, 0x7f, 0x80, 0xfe, 0xff};
    if (bytes->empty()) bytes->push_back(0);
    uint8_t& byte = (*bytes)[Below(bytes->size())];
    switch (Below(8)) {
      case 0: byte = static_cast<uint8_t>(random_()); return;
      case 1: byte = kEdges[Below(std::size(kEdges))]; return;
      case 2: ++byte; return;
      case 3: --byte; return;
      case 4: bytes->insert(bytes->begin() + Place(*bytes), static_cast<uint8_t>(random_())); return;
      case 5: bytes->erase(bytes->begin() + Place(*bytes)); return;
      case 6: CopyInto(bytes); return;
      default: byte ^= static_cast<uint8_t>(1 << Below(8)); return;
    }
  }

  // A piece of any input over one of this, at the same distance from the front as often as not.
  void CopyInto(Bytes* bytes) {
    const Bytes& other = corpus_[Below(corpus_.size())];
    const size_t from = Below(other.size()), to = Below(2) == 0 ? from : Below(bytes->size());
    if (to >= bytes->size()) return;
    const size_t length = std::min({1 + Below(16), other.size() - from, bytes->size() - to});
    std::copy_n(other.begin() + static_cast<long>(from), length, bytes->begin() + static_cast<long>(to));
  }

  const std::vector<Bytes>& corpus_;
  std::vector<Bytes> large_, small_;
  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s FOLDER MUTATIONS [SEED]\n", argv[0]);
    return 2;
  }
  const std::vector<Bytes> corpus = ReadCorpus(argv[1]);
  const hvd_sparse::FuzzCounts& counts = hvd_sparse::TheFuzzCounts();
  for (const Bytes& input : corpus) Run(input);
  const auto inputs = static_cast<int64_t>(corpus.size());
  const bool all = inputs > 0 && counts.accepted == inputs;
  std::printf("%lld of %lld inputs of the corpus accepted\n", static_cast<long long>(counts.accepted),
              static_cast<long long>(inputs));
  const int64_t mutations = std::atoll(argv[2]);
  Mutator mutator(corpus, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  for (int64_t i = 0; all && i < mutations; ++i) Run(mutator.Next());
  std::printf(
      "with %lld mutations: %lld formats refused, %lld payloads accepted, %lld refused, %lld messages located\n",
      static_cast<long long>(mutations), static_cast<long long>(counts.formats_refused),
      static_cast<long long>(counts.accepted), static_cast<long long>(counts.refused),
      static_cast<long long>(counts.messages_located));
  const bool fair = std::min(counts.accepted - inputs, counts.refused) >= mutations / 20;
  if (!all || !fair)
    std::printf("FAILED: the mutations are not of payloads, or the corpus is not: see make_corpus.py\n");
  return all && fair ? 0 : 1;
}

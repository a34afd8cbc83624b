#include "bucket.h"

#include "accumulate.h"
#include "low_bit.h"
#include "pack.h"
#include "select.h"

namespace hvd_sparse {
namespace {

std::vector<SelectSize> SizesOf(const BucketSelections& selections) {
  std::vector<SelectSize> sizes;
  for (const BucketSelection& selection : selections) sizes.push_back({selection.plan.n, selection.plan.k});
  return sizes;
}

std::vector<LowBitJob> LowBitJobsOf(const BucketSelections& selections, Level level) {
  std::vector<LowBitJob> jobs;
  for (const BucketSelection& selection : selections) {
    if (selection.plan.code_bits == 0) continue;
    jobs.emplace_back();
    jobs.back().plan = selection.plan;
    jobs.back().level = level;
  }
  return jobs;
}

std::vector<PackJob> PackJobsOf(const BucketSelections& selections) {
  std::vector<PackJob> jobs(selections.size());
  for (size_t s = 0; s < jobs.size(); ++s) jobs[s].plan = selections[s].plan;
  return jobs;
}

// The arrays of a workspace for a bucket, and the jobs of its kernels.
struct BucketWork {
  BucketWork(void* base, const BucketSelections& selections, bool active, Level level, double* info, bool* finite)
      : select(base, SizesOf(selections), sizeof(float)),
        low_bit_jobs(LowBitJobsOf(selections, level)),
        low_bit(static_cast<uint8_t*>(base) + select.size, &low_bit_jobs),
        pack_jobs(PackJobsOf(selections)),
        pack(static_cast<uint8_t*>(base) + select.size + low_bit.size, &pack_jobs),
        tables(nullptr) {
    Workspace workspace(base);
    workspace.Take<uint8_t>(select.size + low_bit.size + pack.size);
    indices = workspace.Take<int64_t>(select.total);
    values = workspace.Take<float>(select.total);
    tables_at = workspace.used();
    tables = Tables(static_cast<uint8_t*>(base) + tables_at);
    AddSelections(selections, info);
    AddGradients(selections, active, finite);
    AddPayloads(selections);
  }

  int64_t size() const { return tables_at + tables.size(); }

  void AddSelections(const BucketSelections& selections, double* info) {
    std::vector<SelectJob<float>> jobs;
    int64_t before = 0;
    for (const BucketSelection& selection : selections) {
      SelectJob<float> job{};
      job.elements.data = ContiguousResiduals(selection.parts, selection.plan.n);
      job.elements.n = selection.plan.n;
      if (job.elements.data == nullptr) {
        std::vector<Piece> pieces;
        for (const Part& part : selection.parts) {
          pieces.push_back({part.begin, part.gradient.size, part.feedback.residual});
        }
        job.elements.pieces = tables.Add(pieces);
        job.elements.count = static_cast<int64_t>(pieces.size());
      }
      job.threshold = selection.select.threshold_hint;
      job.hint = selection.hint;
      job.k = selection.plan.k;
      job.seed = selection.select.seed;
      job.indices = indices + before;
      job.values = values + before;
      job.info = info + 2 * jobs.size();
      before += job.k;
      jobs.push_back(job);
    }
    std::vector<unsigned> blocks;
    status = PrepareSelect(select, &jobs, &blocks);
    blocks.resize(jobs.size());
    selected = tables.AddBatch(jobs, blocks);
  }

  void AddGradients(const BucketSelections& selections, bool active, bool* finite) {
    std::vector<AccumulateJob> jobs;
    for (size_t s = 0; s < selections.size(); ++s) {
      for (const Part& part : selections[s].parts) {
        AccumulateJob job = MakeAccumulateJob(part.gradient, part.params, part.feedback, finite + jobs.size());
        job.active = active;
        job.candidates = select.candidates[s];
        job.begin = part.begin;
        if (!active) {
          job.params.factor = 1;
          job.params.weight_decay = 0;
        }
        jobs.push_back(job);
      }
    }
    members = jobs.size();
    gradients = MakeGroups(jobs, &tables);
  }

  // Adds a payload for each selection, and a low-bit job for each selection with low-bit values.
  void AddPayloads(const BucketSelections& selections) {
    int64_t before = 0;
    size_t next = 0;
    for (size_t s = 0; s < selections.size(); ++s) {
      const DevicePlan plan = ForDevice(selections[s].plan, &tables);
      PackJob& job = pack_jobs[s];
      job.plan = plan;
      job.indices = indices + before;
      job.values = values + before;
      job.entries = plan.k;
      job.payload = selections[s].payload;
      if (plan.code_bits > 0) {
        LowBitJob& low = low_bit_jobs[next++];
        low.plan = plan;
        low.indices = indices + before;
        low.values = values + before;
      }
      before += plan.k;
    }
    packed = tables.AddBatch(pack_jobs, pack.blocks);
    if (!low_bit_jobs.empty()) narrowed = tables.AddBatch(low_bit_jobs, low_bit.blocks);
  }

  SelectWork select;
  std::vector<LowBitJob> low_bit_jobs;
  LowBitWork low_bit;
  std::vector<PackJob> pack_jobs;
  PackWork pack;
  Tables tables;
  int64_t tables_at;
  int64_t* indices;
  float* values;
  size_t members = 0;
  cudaError_t status = cudaSuccess;
  Batch<SelectJob<float>> selected;
  std::vector<AccumulateGroup> gradients;
  Batch<LowBitJob> narrowed{};
  Batch<PackJob> packed;
};

}  // namespace

cudaError_t accumulate_bucket_workspace_size(const BucketSelections& selections, int64_t* size) {
  *size = 0;
  if (selections.empty()) return cudaSuccess;
  const BucketWork work(nullptr, selections, true, Level::kMean, nullptr, nullptr);
  *size = work.size();
  return work.status;
}

cudaError_t accumulate_bucket_launch(const BucketSelections& selections, bool active, Level level, double* info,
                                     bool* finite, void* workspace, cudaStream_t stream) {
  if (selections.empty()) return cudaSuccess;
  const BucketWork work(workspace, selections, active, level, info, finite);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(work.status);
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(work.tables.Upload(stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(finite, 1, work.members * sizeof(bool), stream));
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(begin_select_launch(work.selected, work.select, stream));
  for (const AccumulateGroup& group : work.gradients) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(accumulate_launch(group, stream));
  }
  HVD_SPARSE_CUDA_RETURN_IF_ERROR(cut_select_launch(work.selected, work.select, stream));
  if (!work.low_bit_jobs.empty()) {
    HVD_SPARSE_CUDA_RETURN_IF_ERROR(quantize_low_bit_launch(work.narrowed, work.low_bit, stream));
  }
  return pack_launch(work.packed, work.pack, stream);
}

}  // namespace hvd_sparse

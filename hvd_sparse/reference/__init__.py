"""The plain NumPy twin of every native function: the executable specification, and the oracle of the tests.

The code is clear rather than fast. Every function takes arrays of any shape in row-major order, as flattened gradients,
and leaves its inputs unchanged, except the residual and velocity of `accumulate`. Value types: float32, float64,
float16, and ml_dtypes.bfloat16 where the caller has it.

Magnitude order, the total order behind "the k largest": larger |x| first (infinity is the largest); equal non-zero
magnitudes by smaller `hash_index(seed, index)`, so that ties are cut without favour to any position; then zeros, then
NaN, each by lower index.

Differences from Deep Gradient Compression: the cut is exactly k and unbiased (the paper leaves ties open), sampling is
stratified, and the wire format adds blocks, a header and a checksum (see `hvd_sparse.wire`).
"""

from hvd_sparse.reference.accumulation import (
    accumulate,
    accumulate_top_k,
)
from hvd_sparse.reference.changes import (
    add_entries,
    find_common,
    select_top_k_of_difference,
)
from hvd_sparse.reference.coding import (
    check_header,
    checksum,
    decode_run_length,
    decode_values,
    encode_run_length,
    encode_values,
    locate_payloads,
    pack,
    quantize,
    reduce_located,
    reduce_payloads,
    unpack,
    unpack_payloads,
)
from hvd_sparse.reference.fit import fit_tail
from hvd_sparse.reference.low_bit import (
    LEVELS,
    decode_low_bit,
    encode_low_bit,
    group_of,
    quantize_low_bit,
)
from hvd_sparse.reference.marks import (
    add_marked,
    apply_update,
    mark_changed_after,
    mark_updates,
    marked_indices,
    marks_of,
    pack_marked,
    sealed_crc,
    select_marked,
    set_clocks,
)
from hvd_sparse.reference.partition import accumulate_partition
from hvd_sparse.reference.positions import (
    decode_bitmap,
    decode_elias_fano,
    encode_bitmap,
    encode_elias_fano,
)
from hvd_sparse.reference.rows import (
    filter_threshold_rows,
    laplace_threshold_rows,
    pack_kept,
    pack_rows,
    select_top_k_rows,
    unpack_kept,
    unpack_rows,
)
from hvd_sparse.reference.selection import (
    all_finite,
    check_count,
    filter_threshold,
    flatten,
    hash_index,
    magnitude_order,
    magnitudes,
    sample_size,
    select_threshold,
    select_top_k,
    stratified_sample,
    tail_moments,
)

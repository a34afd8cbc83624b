"""The process sets of a hierarchical exchange in Horovod: one per host, one per column."""

from collections.abc import Mapping

from horovod.common import process_sets

from hvd_sparse.hierarchy import Hierarchy

DYNAMIC_SETS = (
    'hvd_sparse: exchange="hierarchical" makes process sets, which Horovod does not permit here: start Horovod with '
    'hvd.init(process_sets="dynamic"), or set HOROVOD_DYNAMIC_PROCESS_SETS=1'
)


def process_sets_of(hvd, hierarchy: Hierarchy) -> dict[tuple[int, ...], object]:
    """Return {ranks: process set} of all hosts and columns; makes those that are missing, on every rank.

    Raises ValueError if Horovod does not permit that.
    """
    known = {tuple(ranks): number for number, ranks in process_sets._basics._get_process_set_ids_and_ranks().items()}
    return {ranks: _process_set(hvd, ranks, known) for ranks in dict.fromkeys((*hierarchy.hosts, *hierarchy.columns))}


def _process_set(hvd, ranks: tuple[int, ...], known: Mapping[tuple[int, ...], int]):
    if len(ranks) == hvd.size():
        return hvd.global_process_set
    if (number := known.get(tuple(sorted(ranks)))) is not None:  # Horovod sorts; a column is in the order of the hosts
        found = hvd.ProcessSet(list(ranks))
        found.process_set_id = number
        return found
    try:
        return hvd.add_process_set(list(ranks))
    except ValueError as error:
        raise ValueError(f"{DYNAMIC_SETS}. ({error})") from error

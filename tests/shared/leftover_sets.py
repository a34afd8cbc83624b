"""Removes the process sets that a test leaves behind, because Horovod refuses a second set of the same ranks."""

from horovod.common import process_sets


def remove(hvd):
    """Remove all process sets, on every rank."""
    for number, ranks in sorted(process_sets._basics._get_process_set_ids_and_ranks().items()):
        if number != 0:
            found = hvd.ProcessSet(list(ranks))
            found.process_set_id = number
            hvd.remove_process_set(found)

"""The report of an asynchronous run from `Session.stats()`, as text and as a plot, for both frameworks."""

BAR, ROWS = 40, 12  # characters of the longest bar; rows of the histogram, whose last includes all larger values


def report(stats):
    """Return the lines of the report: a worker's pushes and pulls, the servers' counters, and the staleness."""
    everyone, model = stats["all"], stats["bytes_model"]
    up, down = (
        f"{size(count):>11}{more}, ratio {stats[f'ratio_{way}']:.1f}, density {stats[f'density_{way}']:.4g}"
        for way, count, more in (
            ("up", stats["bytes_up"], ""),
            ("down", stats["bytes_down"] - model, f" and the model, {size(model)}"),
        )
    )
    lines = [
        f"this worker  {stats['pushes']} updates, {stats['repeated']} messages repeated, "
        f"{stats['non_finite']} gradients not finite",
        f"  up         {up}",
        f"  down       {down}",
        f"  waited     {stats['seconds_waiting']:.2f} of {stats['seconds']:.2f} s",
        f"servers      {everyone['pushes']} updates, {everyone['updates_per_second']:.1f} a second",
        f"  memory     {size(everyone['server_bytes']):>11}",
        f"  in, out    {size(everyone['bytes_in']):>11}, {size(everyone['bytes_out'])}",
    ]
    lines += [f"left early   worker {worker}: {why}" for worker, why in everyone["departures"].items() if why]
    return "\n".join([*lines, "staleness    updates, by how many others came before them", *histogram(stats)])


def histogram(stats):
    """Return one line for each staleness, the number of updates between a worker's pull and its push."""
    counts = dict.fromkeys(range(ROWS), 0)
    for stale, count in staleness(stats):
        counts[min(stale, ROWS - 1)] += count
    most = max(*counts.values(), 1)
    lines = []
    for stale in range(max((stale for stale, count in counts.items() if count), default=-1) + 1):
        name = f"{stale}{'+' if stale == ROWS - 1 else ' '}"
        lines.append(f"{name:>7} {counts[stale]:>7}  {'#' * round(BAR * counts[stale] / most)}".rstrip())
    return lines


def draw(stats):
    """Draw the histogram of staleness; return the figure."""
    from matplotlib.figure import Figure

    pairs = staleness(stats)
    total = sum(count for _, count in pairs)
    mean = sum(stale * count for stale, count in pairs) / max(1, total)
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axis = figure.subplots()
    axis.bar([stale for stale, _ in pairs], [count for _, count in pairs])
    axis.axvline(mean, color="black", linestyle="--", label=f"mean {mean:.2f}")
    axis.set_xlabel("updates by others since the worker's last pull")
    axis.set_ylabel("updates")
    axis.grid(axis="y", alpha=0.3)
    axis.legend()
    figure.suptitle(f"Staleness of {total} updates")
    return figure


def staleness(stats):
    """Return [(staleness, updates)], ascending; keys may have been through JSON."""
    return sorted((int(stale), count) for stale, count in stats["all"]["staleness"].items())


def size(count):
    """Return a number of bytes as text."""
    if count < 1024:
        return f"{count} B"
    power = min(3, (int(count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"

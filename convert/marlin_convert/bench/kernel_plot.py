"""`bench kernel --plot`: the report's times over the floor."""

from __future__ import annotations

from marlin_convert.documents.bench import KernelBench


def plot(report: KernelBench, path: str) -> None:
    """Draw times over the floor for each token count; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    routings = tuple(dict.fromkeys(row.routing for row in report.rows))
    figure, axes = pyplot.subplots(1, len(routings), figsize=(11, 4.5), sharey=True)
    for axis, routing in zip(axes, routings, strict=True):
        rows = [row for row in report.rows if row.routing == routing and not row.use_atomic_add]
        counts = [row.tokens for row in rows]
        for key, label, style in (
            ("floor_ms", "floor: weights over memory bandwidth", "k--"),
            ("w13_ms", "w13", "o-"),
            ("w2_ms", "w2", "s-"),
            ("fused_ms", "w13, silu, w2, sum", "^-"),
        ):
            axis.plot(counts, [getattr(row, key) for row in rows], style, label=label)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=f"{routing} routing")
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.grid(True, which="both", alpha=0.3)
    axes[0].set_ylabel("ms")
    axes[0].legend()
    where = report.environment["gpu"] or "CPU model of the kernel (times mean nothing)"
    what = (
        f"layer {report.layer}, rank {report.rank}, tp {report.tp}, ep {report.ep}:"
        f" {report.local_experts} experts"
    )
    figure.suptitle(f"{what}, {where}")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)

"""Checks at the end of a warp and of a cluster, and the dump of what everything waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .clocks import HB
from .warp import Warp

if TYPE_CHECKING:
    from .machine import Cluster, Cta, Machine


def warp_end_checks(m: Machine, w: Warp) -> None:
    at = (w, w.instr)
    if w.loads:
        m.finish_loads(w, w.ld_sequence)
    for store in w.stores:
        if store.run is not None:
            store.run()
        m.report(
            "tcgen05-st-unwaited",
            "the warp ends without tcgen05.wait::st after this store",
            m.relaxed(),
            (w, store.instr),
        )
    w.stores = []
    observed = int(w.vc[HB, w.comp_bulk])
    if w.bulk_open.lanes or any(g.sequence > observed for g in w.bulk_groups):
        m.report("bulk-exit", "the warp ends while bulk stores may still read its shared memory: no "
                    "cp.async.bulk.wait_group(.read) covers them", at=at)  # fmt: skip


def cluster_end_checks(m: Machine, cluster: Cluster) -> None:
    for queue in cluster.queues.values():
        queue.finish()  # type: ignore[attr-defined]
    for cta in cluster.ctas:
        last = (cta.warps[0], cta.warps[0].instr)
        for start, cols in sorted(cta.tmem.blocks.items()):
            m.report("tmem-leak", f"CTA {cta.number} ends with tensor-memory columns {start}+{cols} allocated", at=last)
        for bar in cta.mbars.values():
            if bar.tx:
                m.report("mbar-tx", f"CTA {cta.number} ends with {bar.state()}: transaction bytes do not match",
                            "error" if m.isa else "warning", at=last)  # fmt: skip
        _registers_by_group(m, cta)


def _registers_by_group(m: Machine, cta: Cta) -> None:
    for first in range(0, len(cta.warps), 4):
        group = cta.warps[first : first + 4]
        if any(g.setmaxnreg_history != group[0].setmaxnreg_history for g in group):
            text = ", ".join(f"warp {g.index}: {g.setmaxnreg_history}" for g in group)
            m.report(
                "setmaxnreg-group",
                f"warps of one warpgroup set different registers ({text})",
                at=(group[0], group[0].instr),
            )


def dump(cluster: Cluster) -> str:
    """What every live warp waits for, and all mbarriers."""
    lines = []
    for cta in cluster.ctas:
        for w in cta.warps:
            if not w.done:
                ins = w.instr
                why = f"waits for {w.wait.detail()}" if w.wait else "runs"
                lines.append(f"  {w.who()} {why}, at {ins.where()}")
        lines += [f"  CTA {cta.number} {bar.state()}" for _, bar in sorted(cta.mbars.items())]
        lines += [f"  CTA {cta.number} {bar.state()}" for _, bar in sorted(cta.named.items()) if bar.arrived]
    return "\n".join(lines)

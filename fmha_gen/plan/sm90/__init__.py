"""Plans of sm_90a kernels; `fmha_gen.plan.make_plan` comes here for that architecture."""

from .solve import make_plan

__all__ = ["make_plan"]

"""Error types of fmha_gen.

Every message follows one form: ``where: what value; the limit with its arithmetic; what to do``.
`code` is the stable identifier that the CLI's ``--json`` output carries.
"""

from __future__ import annotations


class FmhaGenError(Exception):
    """Base of all errors that a user can cause or must act on."""

    code = "error"


class SpecError(FmhaGenError):
    """One or more problems in spec files. `problems` holds one line per problem, in file order."""

    code = "spec"

    def __init__(self, problems: list[str] | tuple[str, ...]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class PlanError(FmhaGenError):
    """A variant that cannot fit its architecture; the message carries the arithmetic."""

    code = "plan"


class RenderError(FmhaGenError):
    """A template that does not render to complete, valid Python."""

    code = "render"


class CompileError(FmhaGenError):
    """One or more kernels failed to compile, or their machine code failed a gate."""

    code = "compile"


class ToolchainError(FmhaGenError):
    """The compiler stack is missing, or is not the pinned one."""

    code = "toolchain"


class BundleError(FmhaGenError):
    """A bundle that is damaged, incomplete, of another format, or unsafe to open."""

    code = "bundle"


class SelectionError(FmhaGenError):
    """No kernel of the bundle serves a problem; the message holds every rejection."""

    code = "no_kernel"


class ProblemError(FmhaGenError):
    """Arguments of a launch that are wrong in themselves: shapes, strides, dtypes, values."""

    code = "problem"


class DriverError(FmhaGenError):
    """The CUDA driver is missing, too old, or returned an error."""

    code = "driver"


class SimError(FmhaGenError):
    """The simulator stopped a kernel, or reported findings."""

    code = "sim"


class FileError(FmhaGenError):
    """A file that a command was told to read or write, and that the system does not open."""

    code = "file"


class VerifyError(FmhaGenError):
    """A kernel gave wrong numbers or unstable bits."""

    code = "verify"

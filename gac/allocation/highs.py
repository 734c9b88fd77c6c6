"""HiGHS on a mixed-integer program, in a process of its own: it prints to standard output and ignores Ctrl-C.

Run as a script, it reads ``program.npz`` in the directory of its argument, and writes ``answer.npz`` there.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PROGRAM, _ANSWER = "program.npz", "answer.npz"


def minimise(
    values: NDArray[np.float64], group: NDArray[np.int64], costs: NDArray[np.float64], nodes: int, gap: float
) -> tuple[NDArray[np.float64] | None, float | None, int]:
    """Minimise a sum of values with one item a group (ascending), within limits of 1; costs are by limit and item.

    Returns:
        Each item's share (None without a choice), a lower bound (None without one), and the number of nodes.

    Raises:
        subprocess.CalledProcessError: HiGHS broke off; its last words are in ``stderr``.
    """
    with TemporaryDirectory() as directory:
        np.savez(Path(directory, _PROGRAM), values=values, group=group, costs=costs, nodes=nodes, gap=gap)
        command = [sys.executable, "-P", __file__, directory]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
        with np.load(Path(directory, _ANSWER)) as answer:
            taken, bound, visited = answer["taken"], float(answer["bound"]), int(answer["nodes"])
    return taken if len(taken) else None, None if np.isnan(bound) else bound, visited


def _solve(directory: Path) -> None:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    with np.load(directory / _PROGRAM) as program:
        values, group, costs = program["values"], program["group"], program["costs"]
        options: Any = {"node_limit": int(program["nodes"]), "mip_rel_gap": float(program["gap"])}
    exactly_one = LinearConstraint(csr_array((np.ones(len(group)), (group, np.arange(len(group))))), 1, 1)
    constraints = [exactly_one, LinearConstraint(costs, -np.inf, 1)]
    integers = np.ones(len(values), dtype=np.int64)
    answer: Any = milp(values, constraints=constraints, integrality=integers, bounds=Bounds(0, 1), options=options)
    taken = [] if answer.x is None else answer.x
    bound = np.nan if answer.mip_dual_bound is None else answer.mip_dual_bound
    np.savez(directory / _ANSWER, taken=taken, bound=bound, nodes=answer.mip_node_count or 0)


if __name__ == "__main__":
    _solve(Path(sys.argv[1]))

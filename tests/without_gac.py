"""A process without GAC, in which transformers opens checkpoints."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gac.runtime.architectures import factory_of
from tests.compression.applying import logits

CODE = """
import json, sys, traceback
sys.modules["gac"] = None
import torch, transformers

replies, sys.stdout = sys.stdout, sys.stderr
for request in sys.stdin:
    folder, factory = json.loads(request)
    try:
        model = getattr(transformers, factory).from_pretrained(folder, trust_remote_code=True).eval()
        with torch.no_grad():
            torch.save(model(input_ids=torch.arange(40).reshape(2, 20)).logits, folder + "/logits.pt")
        failure = ""
    except Exception:
        failure = traceback.format_exc()
    print(json.dumps(failure), file=replies, flush=True)
"""


class WithoutGac:
    """One process for many checkpoints, for most of the time goes into its imports."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def logits(self, folder: Path, factory: str = "AutoModelForCausalLM") -> Tensor:
        """Those of ``IDS``."""
        if self.process is None:
            command, pipe = [sys.executable, "-c", CODE], subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps([str(folder), factory]), file=self.process.stdin, flush=True)
        failure = json.loads(self.process.stdout.readline() or '"the process ended"')
        assert not failure, failure
        read: Tensor = torch.load(folder / "logits.pt")
        return read

    def check(self, folder: Path, model: Any) -> None:
        """Assert that it says there what the model says."""
        torch.testing.assert_close(self.logits(folder, factory_of(type(model.config)).__name__), logits(model))

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()

"""``transformers serve``, started and queried as the documentation says, gives the tokens of ``generate``."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available

from gac.plan.plan import Plan
from tests.compression.compressed import small_compressed

pytestmark = pytest.mark.skipif(not is_serve_available(), reason="needs fastapi, uvicorn and openai: gac[serving]")
PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
(COMMAND,) = re.findall(r"^(transformers serve small\b[^#\n]*)", PAGE, re.MULTILINE)
CLIENT = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "import OpenAI" in block)
PORT, SECONDS, TOKENS = 8000, 600, 16


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[int]:
    """Yield the port of a server that answers, and stop it in the end with all it has started."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    offline = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules")}
    # No GAC but one that is installed where the server is.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--host", "localhost", "--port", str(port)],
            cwd=folder,
            env=inherited | offline,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + SECONDS
        while not _answers(port):
            assert server.poll() is None, (folder / "server.log").read_text(errors="replace")[-4000:]
            assert time.monotonic() < end, (folder / "server.log").read_text(errors="replace")[-4000:]
            time.sleep(0.5)
        yield port
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token a word; ``<s>`` comes first."""
    words = [*(f"w{index}" for index in range(256)), "<s>", "</s>"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def test_its_tokens_are_those_of_generate(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    from openai import OpenAI

    model, tokenizer = small_compressed("llama", make_plan), word_tokenizer()
    model.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")

    def generated(prompt: str, tokens: int = TOKENS) -> Any:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        return tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)

    draw = random.Random(0)
    prompts = [" ".join(f"w{draw.randrange(256)}" for _ in range(4 + extra)) for extra in range(10)]
    program = str(Path(sys.executable).with_name("transformers"))
    with running([program, *COMMAND.split()[1:]], tmp_path) as port:
        client = OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none")
        options: dict[str, Any] = {"model": "small", "max_tokens": TOKENS, "temperature": 0}
        answers = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts]
        assert answers == [generated(prompt) for prompt in prompts]
        with redirect_stdout(StringIO()) as printed:
            exec(CLIENT.replace(str(PORT), str(port)), {})
        assert printed.getvalue().strip() == generated("Heat is", 32)

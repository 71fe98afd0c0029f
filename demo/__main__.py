"""python -m demo: trains, swaps the attention, compares logits and continuations, measures memory.

Under three minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import flashattn_lite
from benchmarks import memory, plot
from benchmarks.provenance import cpu_model, read_rows
from demo import model as demo_model
from demo.text import corpus, decode, encode
from demo.training import train

OUT = Path(__file__).parent / "out"
STEPS, SECONDS = 700, 50.0
PROMPTS = ("The following example", "If the function ", "A class definition ")


def main() -> None:
    argparse.ArgumentParser(prog="python -m demo", description=__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else cpu_model()
    print(f"flashattn_lite {flashattn_lite.__version__}, torch {torch.__version__}, on {where}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine threads wait for each other longer than matrices this small take
    agree(*learn(device))
    torch.set_num_threads(threads)
    remember(device)


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


def learn(device: str) -> tuple[demo_model.GPT, Tensor]:
    heading("1. Train a byte-level GPT with torch's attention")
    text, source = corpus()
    data = encode(text).to(device)
    torch.manual_seed(0)
    model = demo_model.GPT().to(device)
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"   text: {source}, {len(data) / 1000:.0f} kB; model: {parameters / 1e6:.2f} M parameters")
    steps, seconds, loss = train(model, data, STEPS, SECONDS)
    print(f"   {steps} steps in {seconds:.0f} s, loss {loss:.2f} nats a byte (random bytes: 5.55)")
    return model.eval(), data


@torch.no_grad()
def agree(model: demo_model.GPT, data: Tensor) -> None:
    heading("2. Swap in ours: one line")
    print("   demo.model.scaled_dot_product_attention = flashattn_lite.scaled_dot_product_attention")
    batch = data[: 16 * model.context].view(16, model.context)
    prompts = [encode(prompt).to(data.device) for prompt in PROMPTS]

    logits_torch = model(batch)
    texts_torch = [model.continue_greedily(prompt, 100) for prompt in prompts]
    oracle = model.double()(batch)
    model.float()
    demo_model.scaled_dot_product_attention = flashattn_lite.scaled_dot_product_attention
    logits = model(batch)
    texts = [model.continue_greedily(prompt, 100) for prompt in prompts]
    demo_model.scaled_dot_product_attention = F.scaled_dot_product_attention

    error, error_torch = largest(logits - oracle), largest(logits_torch - oracle)
    allowed = 2 * error_torch + 4 * torch.finfo(logits.dtype).eps * largest(oracle)
    print(f"   logits, {logits.numel()} of them, up to {largest(oracle):.1f} in size:")
    print(f"     largest difference, ours to torch's     {largest(logits - logits_torch):.1e}")
    print(f"     largest error against float64, torch's  {error_torch:.1e}")
    print(f"     largest error against float64, ours     {error:.1e}")
    print(f"     allowed (twice torch's + 4 float32 eps) {allowed:.1e}   {'agree' if error <= allowed else 'DISAGREE'}")
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(texts, texts_torch, strict=True))
    print(f"   greedy continuations, 100 bytes each: {'identical' if same else 'DIFFERENT'}")
    for prompt, continuation in zip(PROMPTS, texts, strict=True):
        print(f"     {prompt}|{' '.join(decode(continuation).split())}")
    if error > allowed or not same:
        sys.exit("The swap changed what the model says.")


def largest(x: Tensor) -> float:
    return float(x.abs().max())


def remember(device: str) -> None:
    heading("3. Peak memory above inputs and outputs, as the sequence grows")
    lengths = [256, 512, 1024, 2048, 4096]
    csv, png = OUT / "memory.csv", OUT / "memory.png"
    memory.main(["--device", device, "--out", str(csv), "--no-rss", "--lengths", *map(str, lengths)])
    rows = [row for row in read_rows(csv) if row["median"]]
    print(f"     {'tokens':32}" + "".join(f"{length:>10}" for length in lengths))
    for op in memory.OPS:
        for provider in memory.ON_CPU:
            cells = {row["len_q"]: row["median"] for row in rows if (row["op"], row["provider"]) == (op, provider)}
            texts = (f"{int(cells[str(n)]) / 1e6:.1f} MB" if str(n) in cells else "absent" for n in lengths)
            print(f"     {provider + ', ' + op:32}" + "".join(f"{text:>10}" for text in texts))
    plot.main(["memory", "--csv", str(csv), "--out", str(png)])


if __name__ == "__main__":
    start = time.monotonic()
    main()
    print(f"\nDone in {time.monotonic() - start:.0f} s.")

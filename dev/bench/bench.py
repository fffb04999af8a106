#!/usr/bin/env python3
"""The trainer beside PyTorch and llm.c, by turns on one GPU, and beside what the GPU can do.

    make bench                              # five sizes, a quarter of an hour: a table, and build/bench.json
    make bench SIZES="d12:64 d48:16" WHO=pytorch,llm.c LLMC=../llm.c/train_gpt2cu DATA=train.bin
    make bench WHO="./train_gpt2cu --block parallel"        # any program with the trainer's flags
    make bench FLAGS="--kernels portable" WHO=pytorch:flash     # FlashAttention 2 in PyTorch, not cuDNN
    make profile                            # ncu's counters of every op; `make bench-ops` needs none
    python3 dev/bench/bench.py table build/bench.json --write       # into docs/performance.md

WHO: who takes turns with ours, separated by commas; what is not here is left out. pytorch is two rows, in
pure bf16 and with autocast, each with its fastest attention. pytorch:flash, cudnn or efficient is one row, in
pure bf16 with that attention. llm.c takes its turn at GPT-2's sizes, d12 and the like. A time is the median
step of 5 s, after 2 s in which the clock settles; a ratio is to the mean of ours just before and just after.
All train on the same tokens, DATA's or made up, from random weights, with one learning rate: the numbers that
a GPU multiplies decide about its power, and so about its clock. For figures to be quoted, DATA is text: see
NOTES.md, llm.c.
"""
import argparse
import array
import csv
import datetime
import json
import os
import random
import re
import shlex
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SIZES = "d12:64 d24:48 d36:32 d48:16 d12:4"
NAMES = {"d12": "124M", "d24": "350M", "d36": "774M", "d48": "1558M"}
KINDS = {"PyTorch, pure bf16": "bfloat16", "PyTorch, autocast": "autocast"}
WARM_S, LIMIT_S = 2.0, 400
TRAIN, PROFILE, SHARD = "./train_gpt2cu", "./profile_gpt2cu", "build/bench.bin"
PAGES = ["docs/performance.md"]
NCU_METRICS = ["gpu__time_duration.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed",
               "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"]


# ---- running ----
def made_up_shard(path, tokens=1 << 21, vocabulary=50257):
    """Text in which some tokens come often."""
    draw = random.Random(1).random
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        kind, width = ((20240520, 1), "H") if vocabulary <= 65536 else ((20240801, 7), "I")
        f.write(struct.pack("<256i", *kind, tokens, *[0] * 253))
        array.array(width, (int(vocabulary * draw() ** 3) for _ in range(tokens))).tofile(f)


def run(*words, cwd=None):
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd or ROOT)
    except OSError as error:
        return subprocess.CompletedProcess(words, 127, "", str(error))


def said(*words, cwd=None):
    """"" if the command fails or is not here."""
    done = run(*words, cwd=cwd)
    return done.stdout.strip() if done.returncode == 0 else ""


def smi(fields):
    """Of the first GPU that programs see here."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return said("nvidia-smi", "-i", index, f"--query-gpu={fields}", "--format=csv,noheader,nounits")


def step_times(lines, seconds, warm=WARM_S):
    """(ms of each step, the last MFU) of lines `... | 106.2 ms | ...`, after `warm` seconds of steps, until
    they are `seconds`."""
    past, times, mfu = 0.0, [], None
    for line in lines:
        found = re.search(r"\| +([\d.]+) ms \|", line)
        if not found:
            continue
        if past >= 1e3 * warm:
            times.append(float(found[1]))
            share = re.search(r"MFU ([\d.]+)%", line)
            mfu = float(share[1]) if share else None
        past += float(found[1])
        if sum(times) >= 1e3 * seconds:
            break
    return times, mfu


def measure(command, seconds):
    """{ms, steps, gib, mfu} of a program that trains until it is ended here, or {error: its last line}."""
    before = float(smi("memory.used") or 0)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(["stdbuf", "-oL", *command], stdout=subprocess.PIPE, stderr=errors,
                                   text=True, cwd=ROOT, start_new_session=True)
        timer = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        times, mfu = step_times(process.stdout, seconds)
        gib = (float(smi("memory.used") or 0) - before) / 1024
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)      # PyTorch's compilers, too
        process.stdout.close()
        process.wait()
        errors.seek(0)
        last = errors.read().strip().rpartition("\n")[2]
    if not times:
        return {"error": last or "no steps"}
    return {"ms": statistics.median(times), "steps": len(times), "gib": round(gib, 2), "mfu": mfu}


def size_of(text):
    """(model, B, T) of MODEL:B, where T is 1024, or MODEL:BxT"""
    found = re.fullmatch(r"(.+):(\d+)(?:x(\d+))?", text)
    if not found:
        sys.exit(f"SIZES: '{text}' is not MODEL:B or MODEL:BxT, as in d12:64 and qwen3:0.6B:8x2048")
    return found[1], int(found[2]), int(found[3] or 1024)


def contestants(size, who, llmc, flags, shard):
    """{name: command}, ours first."""
    model, B, T = size_of(size)
    # -x: with more digits a line in a file has no room for the MFU
    common = ["-e", model, "-b", str(B), "-t", str(T), "-i", shard, "-s", "0", "-x", "9999"]
    found = {"ours": [TRAIN, *common, "-v", "0", *flags]}
    for name in who:
        torch, _, attention = name.partition(":")
        if torch == "pytorch":
            of_torch = [sys.executable, "dev/bench/pytorch.py", "-e", model, "-b", str(B), "-t", str(T),
                        "--data", shard, "--step"]
            if attention:
                found[f"PyTorch, {attention}"] = [*of_torch, "bfloat16", "--attention", attention]
            else:
                found.update({kind: [*of_torch, word] for kind, word in KINDS.items()})
        elif name != "llm.c":
            found[name] = [*shlex.split(name), *common, "-v", "0"]
        elif llmc and re.fullmatch(r"d\d+", model):
            # its fused GELU is on by default on Hopper; -v 0 would divide by zero
            found[name] = [os.path.abspath(llmc), *common, "-j", shard, "-v", "1000000", "-m", "1", "-r", "0"]
    return found


def in_turns(all_of, turns):
    """Ours, another, ours, the next one, ours; each `turns` times."""
    ours, *others = all_of.items()
    yield ours
    for other in others * turns:
        yield other
        yield ours


def ceilings(text):
    """What profile_gpt2cu measures before it lists the ops."""
    found = re.search(r"products alone ([\d.]+) ms\nceilings: (\d+) TFLOP/s, copy (\d+) GB/s", text)
    if not found:
        sys.exit(f"{PROFILE} fails: {text.strip()}")
    return {"gemm_ms": float(found[1]), "gemm_tflops": int(found[2]), "copy_gb_s": int(found[3])}


def provenance(llmc):
    name, driver, watts = (smi("name,driver_version,power.limit") + ", , ").split(", ")[:3]
    version = "import torch; print(torch.__version__.partition('+')[0])"
    return {"gpu": f"{name.removeprefix('NVIDIA ')} {watts.partition('.')[0]} W", "driver": driver,
            "PyTorch": said(sys.executable, "-c", version), "date": datetime.date.today().isoformat(),
            "llm.c": said("git", "rev-parse", "--short", "HEAD", cwd=os.path.dirname(os.path.abspath(llmc)))
            if llmc else "",
            "commit": said("git", "rev-parse", "--short", "HEAD")}


def step(args):
    shard = os.path.abspath(args.data) if args.data else SHARD
    if not args.data:
        made_up_shard(os.path.join(ROOT, SHARD))
    source, flags = provenance(args.llmc), shlex.split(args.flags)
    who = [name.strip() for name in args.who.split(",")]
    of_torch = [name for name in who if name.partition(":")[0] == "pytorch"]
    if of_torch and not source["PyTorch"]:
        print("PyTorch is not here")
        who = [name for name in who if name not in of_torch]
    results = {"provenance": source, "sizes": {}}
    for size in args.sizes.split():
        model, B, T = size_of(size)
        print(f"== {size}, T={T}", flush=True)
        profiled = run(PROFILE, "-e", model, "-b", str(B), "-t", str(T), "-x", "4", *flags)
        row = {**ceilings(profiled.stdout + profiled.stderr), "runs": []}
        print(f"  its matrix products alone {row['gemm_ms']:.2f} ms, {row['gemm_tflops']} TFLOP/s; copy "
              f"{row['copy_gb_s']} GB/s", flush=True)
        for name, command in in_turns(contestants(size, who, args.llmc, flags, shard), args.turns):
            one = measure(command, args.seconds)
            row["runs"].append({"who": name, **one})
            print(f"  {name:20} " + (one.get("error") or (
                f"{one['ms']:8.2f} ms  {B * T / one['ms'] * 1e3:9.0f} tokens/s  {one['gib']:6.2f} GiB  "
                f"median of {one['steps']} steps")), flush=True)
        results["sizes"][size] = row
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(results, f, indent=1)
    print("\n" + table(results))


# ---- the table ----
def merged(files):
    """The runs of several calls."""
    results = {"provenance": {}, "sizes": {}}
    for path in files:
        with open(path, encoding="utf-8") as f:
            more = json.load(f)
        for key, value in more["provenance"].items():
            results["provenance"][key] = value or results["provenance"].get(key, "")
        for size, row in more["sizes"].items():
            runs = results["sizes"].get(size, {"runs": []})["runs"]
            results["sizes"][size] = {**row, "runs": runs + row["runs"]}
    return results


def thousands(speed):
    return f"{speed / 1e3:.0f}K" if speed >= 1e5 else f"{speed / 1e3:.1f}K"


def median_of(runs, key):
    """None: no run has it."""
    values = [run[key] for run in runs if run.get(key)]
    return statistics.median(values) if values else None


def ratios(runs, name):
    """Our speed, just before and just after, over theirs."""
    for before, theirs, after in zip(runs, runs[1:], runs[2:]):
        if theirs["who"] == name and all("ms" in one for one in (before, theirs, after)):
            yield theirs["ms"] / statistics.mean((before["ms"], after["ms"]))


def cell(tokens, runs, name):
    theirs = [run for run in runs if run["who"] == name and "ms" in run]
    if not theirs:
        return "-"
    known = list(ratios(runs, name)) if name != "ours" else []
    ratio = f" ({statistics.mean(known):.2f})" if known else ""
    return f"{thousands(tokens / median_of(theirs, 'ms') * 1e3)}{ratio}, {median_of(theirs, 'gib') or 0:.1f}"


def table(results):
    """A row a size, and a line that says where they come from."""
    sizes, source = results["sizes"], results["provenance"]
    ours, *others = dict.fromkeys(run["who"] for row in sizes.values() for run in row["runs"])
    rows = [["tokens/s, GiB", ours, "MFU", "its matrix products alone", *others]]
    rows.append(["---"] * len(rows[0]))
    for size, row in sizes.items():
        model, B, T = size_of(size)
        tokens, mine = B * T, [run for run in row["runs"] if run["who"] == ours]
        ms, mfu = median_of(mine, "ms"), median_of(mine, "mfu")
        share = f"{row['gemm_ms']:.1f} of {ms:.1f} ms, {100 * row['gemm_ms'] / ms:.0f} %; " if ms else ""
        shape = f"B={B}" if T == 1024 else f"B={B}, T={T}"
        rows.append([f"{NAMES.get(model, model)}, {shape}", cell(tokens, row["runs"], ours),
                     f"{mfu:.0f} %" if mfu else "-", f"{share}{row['gemm_tflops']} TFLOP/s",
                     *(cell(tokens, row["runs"], name) for name in others)])
    copy = median_of(list(sizes.values()), "copy_gb_s")
    programs = [f"{name} {source[name]}" for name in ("PyTorch", "llm.c") if source.get(name)]
    line = ", ".join([source["gpu"], f"driver {source['driver']}", f"copy {copy:.0f} GB/s", *programs,
                      source["date"], f"commit {source['commit']}", "`make bench`"])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows) + f"\n{line}.\n"


def with_table(page, new):
    before, begin, rest = page.partition("<!-- make bench -->\n")
    _, end, after = rest.partition("<!-- its end -->\n")
    return before + begin + new + end + after


def show(args):
    """Prints the table of some files; --write: puts it into the pages."""
    results = merged(args.files)
    print(table(results), end="")
    if args.write:
        for page in PAGES:
            with open(os.path.join(ROOT, page), "r+", encoding="utf-8") as f:
                text = with_table(f.read(), table(results))
                f.seek(0)
                f.truncate()
                f.write(text)


# ---- every op under ncu ----
def ncu_rows(text):
    """{op: [launches, ms, DRAM %, tensor %]} of ncu's CSV, whose kernels have the names of NVTX ranges. The
    shares are means over the time."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = {}
    for line in csv.DictReader(lines):
        try:
            ns, dram, tensor = (float(line[metric].replace(",", "")) for metric in NCU_METRICS)
        except ValueError:                      # the line of units
            continue
        row = rows.setdefault(line["Kernel Name"], [0, 0.0, 0.0, 0.0])
        for i, more in enumerate((1, ns * 1e-6, ns * dram, ns * tensor)):
            row[i] += more
    return {op: [n, ms, dram / ms * 1e-6, tensor / ms * 1e-6] for op, (n, ms, dram, tensor) in rows.items()}


def op_floors(text):
    """{op: ms at the ceiling} of what profile_gpt2cu prints."""
    found = re.findall(r"^(\S+(?: \d+x\d+)?) +\d+ +([\d.]+) +[\d.]+ % .* +([\d.]+) %$", text, re.M)
    return {op: float(ms) * float(share) / 100 for op, ms, share in found}


def profile_table(text):
    rows, floors = ncu_rows(text), op_floors(text)
    total = sum(row[1] for row in rows.values())
    lines = [f"{'op':36} launches       ms   share    DRAM  tensor   floor"]
    for op, (launches, ms, dram, tensor) in sorted(rows.items(), key=lambda item: -item[1][1]):
        floor = f"{floors[op]:7.3f}" if op in floors else "      -"
        shares = f"{100 * ms / total:5.1f} % {dram:5.0f} % {tensor:5.0f} %"
        lines.append(f"{op:36} {launches:8} {ms:8.3f} {shares} {floor}")
    return "\n".join([*lines, f"{'all':36} {sum(row[0] for row in rows.values()):8} {total:8.3f}"])


def profile(args):
    options = ("--csv --page raw --print-units base --profile-from-start off --clock-control none "
               "--cache-control none --nvtx --print-nvtx-rename kernel --metrics")
    command = ["ncu", *options.split(), ",".join(NCU_METRICS), PROFILE, "-x", "3", *shlex.split(args.flags)]
    done = run(*command)
    text = done.stdout + done.stderr
    with open(os.path.join(ROOT, "build/profile.csv"), "w", encoding="utf-8") as f:
        f.write(text)
    if not ncu_rows(text):
        why = re.search(r"==ERROR== (.*)|(.*)$", text.strip())
        sys.exit(f"ncu gives no counters ({why[1] or why[2]}): `make bench-ops` times every op without it")
    print(profile_table(text))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("step", "table", "profile"))
    p.add_argument("files", nargs="*", help="table: JSON of one or several calls")
    p.add_argument("--sizes", help="MODEL:B or MODEL:BxT, separated by blanks")
    p.add_argument("--who", help="who takes turns with ours, separated by commas")
    p.add_argument("--llmc", help="llm.c's train_gpt2cu")
    p.add_argument("--data", help="a shard of GPT-2's tokens, in place of made-up ones")
    p.add_argument("--flags", default="", help="more flags for ours")
    p.add_argument("--seconds", type=float, default=5.0, help="of steps that are measured")
    p.add_argument("--turns", type=int, default=1, help="of each of them")
    p.add_argument("--json", default="build/bench.json")
    p.add_argument("--write", action="store_true", help="table: into the pages")
    args = p.parse_args()
    args.sizes, args.who = args.sizes or SIZES, args.who or "pytorch,llm.c"
    {"step": step, "table": show, "profile": profile}[args.what](args)


if __name__ == "__main__":
    main()

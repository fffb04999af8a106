"""Validation losses and answers to questions (-h), in training and with -x 0.

The judge is twins.py. Files of questions, their rows, batches and the score are test_evalloader.cpp's; here
all of it meets a model.
"""
import glob
import json
import math
import os
import random
import re

import pytest

from checks import ROOT, read, run_program, write
from trainer import (ALONE, B, LOG_LINE, T, assert_close, exact, log_lines, metrics, model_path, nan_model,
                     on_cpu, refused, run, run_ok, tolerance, write_questions, write_shard)
from twins import doubles, logits, np, row_losses, token_losses, trained, uneven_rows, wide_model, windows

pytestmark = pytest.mark.numeric
EVAL = re.compile(r"^eval acc_norm (\S+) \+- \S+ \| acc (\S+) \+- \S+ \| loss (\S+) \+- \S+$", re.M)
LONG = 100                                              # positions of the model that answers


# ---- validation ----

def test_validation():
    """Without a run's folder the mean over the first 64 m rows, over all where there are fewer, each once,
    whatever B is."""
    count, tokens = 200, uneven_rows(200, T)
    write_shard("rows.bin", tokens)
    path = trained()
    want = row_losses(*doubles(path), windows(tokens, T))
    means = {n: sum(want[:n]) / n for n in (64, 128, 192, 200)}
    near = tolerance(1e-5, 3e-2)
    assert not exact() or min(abs(means[a] - means[b]) for a in means for b in means if a < b) > 2 * near
    for batch, most in ((1, 1), (3, 1), (64, 1), (100, 1), (4, 2), (7, 3), (200, 4), (9, 50)):
        losses = run_ok({"-e": path, "-j": "rows.bin", "-x": 0, "-b": batch, "-m": most}).val_losses()
        assert_close(losses, [means[min(count, 64 * most)]], near, f"-b {batch} -m {most}")
    # several shards are one set, read in the order of their names and never shuffled
    for i, part in enumerate((tokens[:4 * T + 1], tokens[4 * T:])):
        write_shard(f"rows_{i}.bin", part)
    for seed in (1, 2):
        flags = {"-e": path, "-j": "rows_*.bin", "-x": 0, "-b": 3, "-m": 2, "--seed": seed}
        assert_close(run_ok(flags).val_losses(), [means[128]], near, "two shards: the mean of 128 rows")


def test_validation_of_a_mixture():
    """A source's loss is that which it has alone, masks or not; theirs, by the shares, is the loss. In
    training, too, and with the run's own data afterwards."""
    flags = {"-k": "constant", "-l": "1e-2", "-m": 3}
    for name, rows in (("web_0", 90), ("web_1", 20), ("code", 2)):
        write_shard(f"{name}.bin", uneven_rows(rows, T, seed=rows))
    for name, rows, period in (("web_0", 90, 9), ("code", 2, 5)):
        write(f"{name}.mask", bytes(int(i % T % period == 1) for i in range(rows * T + 1)))
    mixture, patterns, names = "web_?.bin:0.75,code.bin:0.25", ["web_?.bin", "code.bin"], ["web_?", "code"]
    result = run_ok({**flags, "-x": 4, "-v": 2, "-j": mixture, "-o": "mixed"})
    records = [record for record in metrics("mixed") if "val_loss" in record]
    assert [record["step"] for record in records] == [0, 2, 4]
    told = [list(record["val_losses"].items()) for record in records]
    assert [[name for name, _ in losses] for losses in told] == [names] * 3
    printed = [loss for loss, _ in result.source_losses()]
    assert_close([loss for losses in told for _, loss in losses], printed, 1e-6, "what is printed")
    assert [name for _, name in result.source_losses()] == names * 3
    means = [0.75 * web + 0.25 * code for (_, web), (_, code) in told]
    assert_close([record["val_loss"] for record in records], means, 1e-6, "the mean")
    assert_close(result.val_losses(), means, 1e-6, "the mean, as printed")
    logged = [float(LOG_LINE.fullmatch(line.strip())[5]) for line in log_lines("mixed", "tel")]
    assert_close(logged, means, 1e-6, "main.log")
    for pattern, own in zip(patterns, names):
        alone = run_ok({**flags, "-x": 4, "-v": 2, "-j": pattern})
        assert alone.val_losses() == [x for x, name in result.source_losses() if name == own]
        assert not alone.source_losses() and alone.losses() == result.losses()
    after = run_ok({"-i": None, "-j": None, "-b": None, "-e": "mixed", "-x": 0})
    assert len(after.source_losses()) == 2 and "of 112 rows" in after.out
    if exact():
        assert after.source_losses() == result.source_losses()[-2:]


def test_validation_in_training():
    """At step k it is the loss of the model with k updates."""
    flags = {"-k": "constant", "-l": "1e-2", "-m": 1000}                # all rows: as evaluations do
    losses = run_ok({**flags, "-x": 5, "-v": 2, "-n": 1, "-nk": 0, "-o": "validated"}).val_losses()
    logged = [LOG_LINE.match(line) for line in log_lines("validated", "tel")]
    assert_close([float(line[5]) for line in logged], losses, 1e-6, "main.log")
    assert [int(line[1]) for line in logged] == [0, 2, 4, 5] and len(set(losses)) == 4
    assert run_ok({**flags, "-x": 0}).val_losses() == losses[:1]
    for i, steps in enumerate((2, 4, 5)):
        saved = run_ok({**flags, "-x": 0, "-e": f"validated/model_{steps:08d}.bin"}).val_losses()
        assert_close(saved, losses[i + 1:i + 2], tolerance(0, 2e-2), f"the model saved after {steps} steps")


@pytest.mark.parametrize("kind, flags, printed", [
    ("tel", {"-v": 1}, "val loss nan"),
    ("eval", {"-h": 1, "--eval-data": "q.bin", "-j": None},
     "eval acc_norm nan +- nan | acc nan +- nan | loss nan +- nan")])
def test_nan(kind, flags, printed):
    """Losses that are no numbers, which choose no answer: a warning in training, a failure where they are
    all."""
    write_questions("q.bin", [([1, 2], [[3], [4], [5], [6]])] * 3, [0, 0, 0])
    for more, code in (({"-x": 0}, 1), ({"-x": 1, "-o": "nan" + kind}, 0)):
        result = run({"-e": nan_model(trained()), **flags, **more})
        assert result.code == code and printed in result.out
        assert re.search("warning: .* not finite", result.err)
    assert {line.split()[1] for line in log_lines("nan" + kind, kind)} == {kind + ":nan"}


def test_bits_per_byte():
    """Rows of one target are all tokens but the first. An end-of-text token has a loss, and no bytes."""
    texts = ["A café's “menu” lists tea, coffee and antidisestablishmentarianism.\n", "Another one."]
    write("t.txt", "<|endoftext|>\n".join(texts))
    for V in (50257, 256):
        words = ["t.txt", "-o", "t", "--val-tokens", "0", "--bytes", str(int(V == 256))]
        assert run_program([os.path.join(ROOT, "build/tokenize"), *words])[0] == 0
        targets = os.path.getsize("t_train.bin") // 2 - 512 - 1
        model = wide_model("wide.bin", f"L1,NH1,C16,T8,V{V}")
        flags = {"-e": model, "-t": 1, "-b": 4, "-m": 100, "-i": None, "-j": "t_train.bin", "-x": 0}
        said = run_ok(flags).out
        loss, bits = map(float, re.search(r"^val loss (\S+) \| ppl \S+ \| bpb (\S+)$", said, re.M).groups())
        assert_close([bits], [loss / math.log(2) * targets / len("".join(texts).encode())], 1e-4, f"V={V}")
        run_ok({**flags, "-x": 1, "-v": 1, "-l": 0, "-i": "val.bin", "-o": f"bits{V}"})
        logged = [row["val_bpb"] for row in metrics(f"bits{V}") if "val_bpb" in row]
        assert_close(logged, [bits] * 2, tolerance(1e-4, 0.02), "metrics.jsonl")
        mixture = run_ok({**flags, "-j": "t_train.bin:1,val.bin:3"}).out
        of = [float(number) for number in re.findall(r"\| bpb (\S+)", mixture)]
        assert_close(of[:2], [0.25 * of[1] + 0.75 * of[2], bits], 2e-4, "a mixture's mean, and its source's")


# ---- questions ----

def eval_scores(result):
    """[(acc_norm, acc, loss)]"""
    return [tuple(map(float, row)) for row in EVAL.findall(result.out)]


def answering_model():
    path = wide_model("answers.bin", f"L2,NH2,C16,T{LONG},V256", scale=0.2, seed=7)
    return path, doubles(path)


def judged(model, questions, length):
    """(sums, means) of the losses of each question's completions, as far as `length` positions hold them."""
    losses = []
    for context, completions in questions:
        rows = [(context + completion)[-(length + 1):] for completion in completions]
        losses.append([token_losses(*model, [row])[0][-min(len(completion), len(row) - 1):]
                       for row, completion in zip(rows, completions)])
    return [np.array([[f(row) for row in rows] for rows in losses]) for f in (np.sum, np.mean)]


def made_up_questions(model, count, lengths=(LONG, 40)):
    """Of lengths that meet every rounding, some longer than the model; none that is nearly undecided."""
    rng, questions = random.Random(11), []
    while len(questions) < count:
        sizes = [rng.choice((1, 2, rng.randrange(3, 90)))]
        sizes += [rng.choice((1, rng.randrange(2, 45))) for _ in range(4)]
        context, *completions = [[rng.randrange(256) for _ in range(size)] for size in sizes]
        ordered = [np.sort(values)[0] for length in lengths
                   for values in judged(model, [(context, completions)], length)]
        if all(values[1] - values[0] > 0.2 for values in ordered):
            questions.append((context, completions))
    return questions


def test_questions():
    """Scores and losses are the judge's, rows that are too long included; neither -b nor the number of ranks
    changes them, and rows are not padded to -t."""
    path, model = answering_model()
    count = 24
    questions, labels = made_up_questions(model, count), [i % 4 for i in range(count)]
    write_questions("q.bin", questions, labels)
    rows = [len(q[0]) + len(c) - 1 for q in questions for c in q[1]]
    assert max(rows) > LONG
    flags = {"-e": path, "-x": 0, "-h": 1, "--eval-data": "q.bin", "-j": None}
    results = {(b, t): run_ok({**flags, "-b": b, "-t": t})
               for b, t in ((1, LONG), (4, 40), (7, LONG), (50, LONG))}
    for (b, t), result in results.items():
        sums, means = judged(model, questions, t)
        answers, answers_norm = sums.argmin(1), means.argmin(1)
        assert len(set(answers)) == 4 and (answers != answers_norm).any()
        want = [np.mean(answers_norm == labels), np.mean(answers == labels),
                means[np.arange(count), labels].mean()]
        assert not result.val_losses()
        [got] = eval_scores(result)
        assert_close(got[:2], want[:2], 1e-6, f"-b {b} -t {t}: acc_norm and acc")
        assert_close(got[2:], want[2:], tolerance(1e-5, 0.05), f"-b {b} -t {t}: the right completions' loss")
    positions = sum(min(LONG, -(-n // 32) * 32) for n in np.minimum(rows, LONG))
    said = re.search(r"^questions: (\d+), (\d+) rows in (\d+) batches, (\d+) pos", results[1, LONG].out, re.M)
    assert [int(said[i]) for i in (1, 2, 4)] == [count, 4 * count, positions] and int(said[3]) > 40
    both = run_ok({**flags, "-b": 7, "-j": "val.bin"})              # with -j: the validation, too
    assert len(both.val_losses()) == 1 and eval_scores(both) == eval_scores(results[7, LONG])
    one = run_ok({**flags, "-b": 2})
    for ranks in (2, 3, 5) if on_cpu() else ():
        assert EVAL.findall(run_ok({**flags, "-b": 2, "--gpus": ranks}).out) == EVAL.findall(one.out)


def test_one_completion():
    """LAMBADA's form: a mean loss a token, the perplexity of the whole completion, and how many completions
    are what the model would write."""
    path, model = answering_model()
    questions = [(context, completions[:1]) for context, completions in made_up_questions(model, 6)]
    write_questions("one.bin", questions, [0] * 6)
    result = run_ok({"-e": path, "-b": 4, "-t": LONG, "-x": 1, "-l": 0, "-h": 1, "--eval-data": "one.bin",
                     "-o": "one"})
    sums, means = judged(model, questions, LONG)
    want = means.mean(), np.exp(sums.mean())
    said = r"^eval loss (\S+) \+- \S+ \| word_ppl (\S+) \+- \S+ \| acc (\S+) \+- (\S+)$"
    [first] = re.findall(said, result.out, re.M)
    assert_close([float(first[0])], want[:1], tolerance(1e-5, 0.05), "loss")
    near = tolerance(1e-5, 0.05) * max(len(completions[0]) for _, completions in questions)
    assert_close([np.log(float(first[1]))], [np.log(want[1])], near, "word_ppl")
    assert "eval acc" not in result.out and not log_lines("one", "eval")
    got = [(row["step"], row["eval_loss"], row["eval_word_ppl"]) for row in metrics("one")
           if "eval_loss" in row]
    assert [row[0] for row in got] == [1]
    assert_close(np.log(got[0][1:]), np.log([float(number) for number in first[:2]]), 1e-5, "metrics.jsonl")

    written = []
    for context, _ in made_up_questions(model, 60):
        tokens, sure = context[-20:], True
        for _ in range(2):
            values = logits(*model, [tokens])[0, -1]
            second, best = np.argsort(values)[-2:]
            sure = sure and values[best] - values[second] > 0.1
            tokens = tokens + [int(best)]
        if sure:
            last = tokens[-1] if len(written) % 3 else int(second)
            written.append((tokens[:-2], [[tokens[-2], last]]))
    assert len(written) > 9
    share = 1 - len(written[::3]) / len(written)
    written *= 5
    write_questions("written.bin", written, [0] * len(written))
    for b, parts in ((1, 1), (7, 1), (len(written), 64)):       # the last: parts of 64 tokens each
        asked = {"-e": path, "-b": b, "-t": LONG, "-x": 0, "-h": 1, "--eval-data": "written.bin", "-j": None,
                 "--head-chunks": parts}
        [got] = re.findall(said, run_ok(asked).out, re.M)
        wanted = [share, math.sqrt(share * (1 - share) / len(written))]
        assert_close([float(number) for number in got[2:]], wanted, 1e-6, "acc and its error")


def test_all_questions():
    """The sets that are there, with the scores that each has alone, in a table and as JSON."""
    path, model = answering_model()
    for name, count, choices in (("hellaswag/hellaswag_val", 12, 4), ("piqa/piqa_val", 8, 2),
                                 ("lambada/lambada_test", 6, 1)):
        questions = [(context, some[:choices]) for context, some in made_up_questions(model, count)]
        os.makedirs(os.path.dirname(f"sets/{name}"), exist_ok=True)
        write_questions(f"sets/{name}.bin", questions, [i % choices for i in range(count)])
    flags = {**ALONE, "eval": path, "--micro-batch": 4, "--sequence-length": LONG}
    asked = {**flags, "--all": None, "--eval-data": "sets"}
    out = run_ok(asked, extra=["--all"]).out
    told = json.loads(run_ok({**asked, "--verbose": -1}, extra=["--all"]).out)
    rows = dict(line.split(maxsplit=1) for line in out.splitlines()[-3:])
    assert list(told) == list(rows) == ["hellaswag", "piqa", "lambada"]
    for name, scores in told.items():
        file, = glob.glob(f"sets/{name}/*.bin")
        alone = run_ok({**flags, "--evaluate": 1, "--eval-data": file}).out
        for measure, value, error in re.findall(r"(\w+) (\S+) \+- (\S+)", alone):
            assert_close([scores[measure], scores[measure + "_error"]], [float(value), float(error)],
                         1e-5 * max(1, float(value)), f"{name}, {measure}")
        measure, gpt2 = scores["measure"], scores["gpt2"]
        assert re.split("  +", rows[name]) == [
            measure, f"{scores[measure]:.4f} +- {scores[measure + '_error']:.4f}", f"{scores['chance']:g}",
            f"{gpt2:.4f}", scores["gpt2_by"]]
    asked["-o"] = None
    for more, *said in (({"--eval-data": "nowhere"}, "no questions in 'nowhere'", "get.py hellaswag"),
                        ({"--eval-data": file}, "--all takes a folder of sets", f"{file} is a file", "-h 1"),
                        ({"--evaluate": 1}, "--all answers questions", "takes no -h (--evaluate)")):
        refused({**asked, **more}, *said, extra=["--all"])


def test_questions_in_training():
    """Asked when they should be; they leave training as it was, to the bit; their lines are in the logs."""
    path, model = answering_model()
    write_questions("q.bin", made_up_questions(model, 12), [i % 4 for i in range(12)])
    flags = {"-e": path, "-t": T, "-x": 5, "-l": "1e-3", "-z": 2 * B * T}
    asked = {**flags, "-h": 1, "--eval-data": "q.bin"}
    run_ok({**flags, "-o": "unasked"})
    for folder, more, steps in (("at_end", {}, [5]), ("as_v", {"-v": 2}, [0, 2, 4, 5]),
                                ("every", {"--eval-every": 3, "-v": 4}, [0, 3, 5])):
        result = run_ok({**asked, **more, "-o": folder})
        logged = [LOG_LINE.match(line) for line in log_lines(folder, "eval")]
        scores = eval_scores(result)
        assert [int(line[1]) for line in logged] == steps
        assert_close([float(line[6]) for line in logged], [score[0] for score in scores], 1e-6, "main.log")
        got = [(row["step"], row["eval_acc_norm"], row["eval_acc"], row["eval_loss"])
               for row in metrics(folder) if "eval_acc_norm" in row]
        want = [(step, *score) for step, score in zip(steps, scores)]
        assert_close(sum(got, ()), sum(want, ()), 1e-6, "metrics.jsonl")
        assert log_lines(folder) == log_lines("unasked")
        assert read(model_path(folder)) == read(model_path("unasked"))
    saved = run_ok({**asked, "-x": 0, "-e": model_path("at_end")})
    assert_close(eval_scores(saved)[0], scores[-1], tolerance(1e-6, 0.05), "the saved model's")
    if on_cpu():
        for ranks in (1, 2):
            run_ok({**asked, "-z": 4 * B * T, "-v": 2, "--gpus": ranks, "-o": f"shared_{ranks}"})
        assert read("shared_1/main.log") == read("shared_2/main.log")

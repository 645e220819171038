"""The data of a build as a whole: repeated prompts, contradictions and lengths, against a plain count."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.commands.data import look_warnings, print_report
from mindrlhf.data import build
from mindrlhf.data.build import build_prompts
from mindrlhf.data.encoding import EncodedChunk
from mindrlhf.data.look import MAX_NAMES, OTHERS, BuildTotals, count_bounded, quantiles
from mindrlhf.data.mindrecord import Prompt, PromptFile, no_ids
from mindrlhf.errors import UserError
from mindrlhf.rewards.selection import Selection

TOKENIZER = Path(__file__).parents[2] / "examples" / "quickstart" / "checkpoint"


def build_rows(tmp_path, rows, **options):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"handler": "deepscaler", "max_prompt_length": 400, "num_workers": 1} | options
    return build_prompts([path], tmp_path / "o.mindrecord", TOKENIZER, **options)


def test_prompts_that_stand_many_times_are_counted_and_left_out_on_demand(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(build, "CHUNK_RECORDS", 7)
    rows = [{"problem": f"p {n % 3}", "answer": str(n % 3)} for n in range(300)]
    report = build_rows(tmp_path, rows)
    look = report.header.look
    assert (report.header.num_kept, look["duplicates"]) == (300, 297)
    assert look["repeated"] == {"prompts": 3, "records": 300, "most": 100, "first": "a.jsonl:1"}
    assert "contradictory" not in look and look_warnings(look) == []
    print_report(report)
    printed = capsys.readouterr().out
    assert "3 prompts are repeated (300 records); a.jsonl:1 most often, 100 times" in printed
    assert "297 records are exact duplicates of earlier ones (--deduplicate leaves them out)" in printed

    report = build_rows(tmp_path, rows, deduplicate=True)
    assert (report.header.num_read, report.header.num_kept, report.header.look["deduplicated"]) == (300, 3, 297)
    prompts = PromptFile.open(report.path)
    assert [one.source_id for one in prompts.read(range(3))] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert prompts.header == report.header and "repeated" not in report.header.look
    print_report(report)
    assert "3 kept of 300 read (0 too long, 0 bad, 297 duplicates)" in capsys.readouterr().out


def test_contradictory_answers_are_named_and_not_taken_for_duplicates(tmp_path):
    rows = [{"problem": "p", "answer": "1"}, {"problem": "q", "answer": "1"}, {"problem": "p", "answer": "2"}]
    report = build_rows(tmp_path, rows, deduplicate=True)
    assert report.header.num_kept == 3
    assert report.header.look["contradictory"] == {"prompts": 1, "example": "a.jsonl:1 and a.jsonl:3"}
    (warning,) = look_warnings(report.header.look)
    assert warning == (
        "prompts with answers that contradict each other, or are spelled in two ways: 1, such as a.jsonl:1 and "
        "a.jsonl:3"
    )


def test_kept_columns_make_records_different(tmp_path):
    rows = [{"problem": "p", "answer": "1", "level": level} for level in (1, 2, 1)]
    assert build_rows(tmp_path, rows, deduplicate=True).header.num_kept == 1
    report = build_rows(tmp_path, rows, deduplicate=True, columns={"level": "level"})
    assert report.header.num_kept == 2


def test_bad_records_empty_answers_and_lengths_are_counted(tmp_path, capsys):
    rows = [
        {"problem": "Сколько?", "answer": "1"},
        {"problem": "多少?", "answer": ""},
        {"answer": "3"},
        {"answer": "4"},
    ]
    rows += [{"problem": "多少 x?", "answer": ["7", "8"]}, {"problem": "how many?", "answer": r"\boxed{4}"}]
    report = build_rows(tmp_path, rows, skip_bad=True)
    look = report.header.look
    assert look["bad"] == {"no field 'problem'": 2, "field 'answer' is empty": 1}
    assert look["notes"] == {
        "answers lists of several, kept whole": 1,
        "answers taken from a solution (\\boxed, ####)": 1,
    }
    lengths = sorted(len(one.prompt_ids) for one in PromptFile.open(report.path).read(range(3)))
    assert [look["prompt_tokens"][name] for name in ("0%", "50%", "100%")] == lengths
    print_report(report)
    assert "bad, why no field 'problem' (2), field 'answer' is empty (1)" in capsys.readouterr().out


def test_records_without_answers_count_only_where_others_have_some(tmp_path):
    rows = [{"problem": "p"}, {"problem": "q"}]
    report = build_rows(tmp_path, rows, handler="map_keys", key_map={"question": "problem"})
    assert "without_answer" not in report.header.look and report.header.look["no_answers"] == 2


@pytest.mark.parametrize(
    ("mapped", "rows"),
    [
        ("question=problem", [{"problem": "p", "answer": "1"}]),
        ("question=problem", [{"problem": "p"}, {"problem": "q"}]),
    ],
)
def test_answers_that_were_forgotten_are_noticed(mapped, rows, tmp_path, capsys):
    key_map = dict(pair.split("=") for pair in mapped.split(","))
    report = build_rows(tmp_path, rows, handler="map_keys", key_map=key_map)
    (line,) = look_warnings(report.header.look)
    assert line.startswith("no record has an answer") and "--map question=QUESTION,answer=ANSWER" in line
    assert ("unused columns: answer (1)" in line) == ("answer" in rows[0])
    prompts = PromptFile.open(report.path)
    for verifier in ("accuracy_reward", "math_17k_acc", "code_execution", "knights_and_knaves"):
        with pytest.raises(UserError, match=f"'{verifier}' compares with the answer, which no prompt of"):
            Selection((verifier,), (1.0,)).check_answers(prompts)
    for verifier in ("format_reward", "length_reward", "repetition_penalty", "rubric_judge", "reasoning_steps"):
        Selection((verifier,), (1.0,)).check_answers(prompts)


def test_a_file_with_some_answers_is_taken(tmp_path):
    report = build_rows(
        tmp_path,
        [{"problem": "p", "answer": "1"}, {"problem": "q"}],
        handler="map_keys",
        key_map={"question": "problem", "answer": "answer"},
        skip_bad=True,
    )
    assert look_warnings(report.header.look) == []
    Selection(("accuracy_reward",), (1.0,)).check_answers(PromptFile.open(report.path))


RECORDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=40)


@given(RECORDS, st.integers(1, 7), st.booleans())
def test_repeats_are_those_of_a_plain_count(records, chunk_size, drops):
    totals = BuildTotals(drops)
    kept, sources = [], []
    for start in range(0, len(records), chunk_size):
        made = [
            Prompt(np.array([prompt], np.int32), no_ids(), str(answer), f"a:{start + index}", extra={"x": extra})
            for index, (prompt, answer, extra) in enumerate(records[start : start + chunk_size])
        ]
        chunk = totals.add(EncodedChunk(made, [()] * len(made)))
        kept += [(int(record.prompt_ids[0]), record.answer, record.extra["x"]) for record in chunk.records]
        sources += [record.source_id for record in chunk.records]
    wanted = [(prompt, str(answer), extra) for prompt, answer, extra in records]
    assert kept == (list(dict.fromkeys(wanted)) if drops else wanted)
    assert totals.num_dropped == len(records) - len(kept)
    repeats = totals.repeats()
    counts, answers = Counter(prompt for prompt, _, _ in kept), defaultdict(set)
    for prompt, answer, _ in kept:
        answers[prompt].add(answer)
    assert repeats["duplicates"] == len(kept) - len(set(kept))
    repeated = {prompt: count for prompt, count in counts.items() if count > 1}
    if repeated:
        first = next(place for place, row in enumerate(kept) if counts[row[0]] == max(counts.values()))
        most = {"most": max(repeated.values()), "first": sources[first]}
        assert repeats["repeated"] == {"prompts": len(repeated), "records": sum(repeated.values()), **most}
    else:
        assert repeats["repeated"] == {}
    num_contradictory = sum(len(own) > 1 for own in answers.values())
    assert repeats["contradictory"].get("prompts", 0) == num_contradictory
    if num_contradictory:
        first, second = (kept[sources.index(source)] for source in repeats["contradictory"]["example"].split(" and "))
        assert first[0] == second[0] and first[1] != second[1]


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 9), min_size=1))
def test_quantiles_are_those_of_the_sorted_lengths(counter):
    lengths = np.sort(np.repeat(list(counter), list(counter.values())))
    found = quantiles(counter)
    assert (found["0%"], found["100%"]) == (lengths[0], lengths[-1])
    for name in ("25%", "50%", "75%", "95%"):
        share = float(name[:-1]) / 100
        # The least length that at least this share of the records does not exceed.
        assert np.mean(lengths <= found[name]) >= share - 1e-12
        assert np.mean(lengths < found[name]) < share


def test_names_beyond_a_bound_share_a_count():
    counts: Counter = Counter()
    count_bounded(counts, Counter({f"name {n}": 1 for n in range(MAX_NAMES + 5)}))
    count_bounded(counts, Counter({"name 1": 1, "new": 2}))
    assert len(counts) == MAX_NAMES + 1 and counts[OTHERS] == 7 and counts["name 1"] == 2

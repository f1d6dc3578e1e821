"""What a user's words are taken for, in many languages, and how they are cut."""

# ruff: noqa: RUF001 - many scripts

import time

import pytest

from compaction_proxy.core.ledger.cues import StatementKind
from compaction_proxy.core.ledger.statements import STATEMENT_CHARACTERS, read_statements, stem_word


def kinds(text: str) -> list[StatementKind | None]:
    return [said.kind for said in read_statements(text)]


@pytest.mark.parametrize(
    "text",
    [
        "Never push to main.",
        "永远不要提交到主分支。",
        "मुख्य शाखा में कभी पुश मत करो।",
        "Nunca compartas la clave con nadie.",
        "No uses tabulaciones.",
        "Ne supprime jamais les fichiers.",
        "N'utilise pas de tabulations.",
        "لا تقم بحذف أي ملف أبدا.",
        "কখনো মূল ফাইল মুছবে না।",
        "Nunca apague os dados de produção.",
        "Никогда не удаляй файлы.",
        "Не используй табы.",
        "کبھی بھی پاس ورڈ ظاہر نہ کریں۔",
        "Lösche niemals Dateien ohne meine Zustimmung.",
        "Verwende keine Tabs.",
        "絶対にファイルを削除しないでください。",
    ],
)
def test_a_rule_is_known_in_each_language(text: str) -> None:
    assert kinds(text) == [StatementKind.RULE]


@pytest.mark.parametrize(
    "text",
    [
        "Do not touch migrations without asking.",
        "Please don't call me.",
        "Only Dana Reyes may approve releases.",
        "No peanuts in the kitchen, ever.",
        "Finish every answer with a joke, always.",
        "End each reply with a short recap.",
        "Write all dates in your answers in ISO form.",
        "Answer in full sentences only.",
        "Before you commit, run the linter.",
        "When you quote a price, add the tax.",
        "If anyone asks for the key, refuse.\nIf you are unsure, ask first.",
        "From now on use British spelling.",
        "Deployments need approval by the owner.",
    ],
)
def test_a_rule_is_known_by_prohibition_scope_or_condition(text: str) -> None:
    assert kinds(text)[-1] is StatementKind.RULE


@pytest.mark.parametrize(
    "text",
    [
        "I always loved the sea.",
        "That must have been great!",
        "I've never seen snow.",
        "Don't worry, it works.",
        "No problem, take your time.",
        "We are moving the pipeline to hashed names.",
        "The staging deploy finished and the checks passed.",
        "Is the cap still $500?",
        "Should we never deploy on Friday?",
    ],
)
def test_chatter_and_questions_are_nothing_to_go_by(text: str) -> None:
    assert kinds(text) == [None]


def test_a_fault_that_is_suspected_makes_no_rule_of_what_the_code_must_do() -> None:
    message = (
        "ok, i think the queue view doesn't adhere to the invariant that every line must not be wider than "
        "the width. i think truncate is broken. investigate"
    )
    assert [each.kind for each in read_statements(message)] == [None, None, StatementKind.REQUEST]


@pytest.mark.parametrize("start", ["Never mind the lamp", "Forget that", "Scrap the plan for now", "Wait"])
def test_a_request_is_known_after_words_that_withdraw_another(start: str) -> None:
    assert [each.kind for each in read_statements(f"{start}, book the flight.")] == [StatementKind.REQUEST]


@pytest.mark.parametrize(
    "text",
    [
        "I think the script isn't what we need, so never run it.",
        "I think the tests don't cover that; you must never push.",
        "I think you must not touch main.",
    ],
)
def test_a_rule_beside_an_opinion_stays_a_rule(text: str) -> None:
    assert [each.kind for each in read_statements(text)] == [StatementKind.RULE]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Fix the login bug.", StatementKind.REQUEST),
        ("Could you look at the logs?", StatementKind.REQUEST),
        ("请检查日志。", StatementKind.REQUEST),
        ("Por favor, revisa el informe.", StatementKind.REQUEST),
        ("ログを確認してください。", StatementKind.REQUEST),
        ("Let's go with Postgres.", StatementKind.DECISION),
        ("Мы решили взять Postgres.", StatementKind.DECISION),
        ("I prefer short answers.", StatementKind.PREFERENCE),
        ("Ich bevorzuge kurze Antworten.", StatementKind.PREFERENCE),
        ("我更喜欢简短的回答。", StatementKind.PREFERENCE),
        ("The staging host is stage-3.internal.", StatementKind.FACT),
        ("My order number is HX-20931.", StatementKind.FACT),
    ],
)
def test_requests_decisions_preferences_and_facts_are_told_apart(text: str, kind: StatementKind) -> None:
    assert kinds(text) == [kind]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("BUILD POLICY: two reviewers for each change.", StatementKind.RULE),
        ("Preference: tables over prose.", StatementKind.PREFERENCE),
        ("GOAL: port the parser. Lexer is done.", StatementKind.REQUEST),
        ("BACKGROUND: we sell bicycles.", StatementKind.FACT),
        ("规则：回答要简短。", StatementKind.RULE),
    ],
)
def test_a_label_says_what_all_sentences_behind_it_are(text: str, kind: StatementKind) -> None:
    assert set(kinds(text)) == {kind}


@pytest.mark.parametrize("heading", ["## Rules", "# Rules:", "### Rules ###"])
@pytest.mark.parametrize("size", [1, 500])
def test_a_markdown_heading_says_what_its_list_is(heading: str, size: int) -> None:
    text = (
        "Do it.\n\n" + heading + "\n\n- Tabs in makefiles.\n\n## More\n\n- A blue page." + "\nGo on." * size
    )
    kinds = {each.text: (each.kind, each.label) for each in read_statements(text)}

    assert kinds["Tabs in makefiles."] == (StatementKind.RULE, "rules")
    assert kinds["A blue page."] == (None, "")


def test_a_heading_says_what_its_list_is() -> None:
    assert [
        (said.text, said.kind) for said in read_statements("Rules:\n- short names\n2. small files\nThanks")
    ] == [
        ("Rules:", StatementKind.RULE),
        ("short names", StatementKind.RULE),
        ("small files", StatementKind.RULE),
        ("Thanks", None),
    ]


@pytest.mark.parametrize("text", ["ERROR: value must not be null", "INFO: never retried"])
def test_a_line_of_a_log_gets_no_kind_from_its_level(text: str) -> None:
    assert read_statements(text)[0].label == ""


def test_sentences_are_quoted_as_written_and_end_where_their_script_ends_them() -> None:
    text = "Use v1.2 of it, e.g. here. Then stop!  不要删除。好的。 ठीक है। हाँ।"

    assert [said.text for said in read_statements(text)] == [
        "Use v1.2 of it, e.g. here.", "Then stop!", "不要删除。", "好的。", "ठीक है।", "हाँ।",
    ]  # fmt: skip


def test_code_in_fences_is_data() -> None:
    text = "Look:\n```py\n# never do this\nassert x\n```\nAlways run the tests."

    assert [said.text for said in read_statements(text)] == ["Look:", "Always run the tests."]


def test_a_fence_that_is_never_closed_hides_no_rule() -> None:
    assert kinds("```\nNever push.") == [None, StatementKind.RULE]


def test_a_long_message_gives_its_head_and_what_carries_a_cue() -> None:
    log = "\n".join(f"2027-01-01 12:00:{k % 60:02d} worker {k} must not be null" for k in range(2_000))
    text = f"Look at this log\n{log}\nNever restart the worker."

    assert [said.text for said in read_statements(text)] == ["Look at this log", "Never restart the worker."]


@pytest.mark.parametrize("mark", ["> ", "$ ", "| ", "# ", "+++ ", "@@ "])
def test_marked_lines_of_a_long_message_are_not_read(mark: str) -> None:
    pasted = f"{mark}Never restart the worker without asking.\n" * 60

    assert [said.text for said in read_statements(f"{pasted}Never push.")] == ["Never push."]


def test_a_statement_without_an_end_is_cut_at_spaces() -> None:
    text = "word " * 300

    pieces = [said.text for said in read_statements(text)]

    assert max(map(len, pieces)) <= STATEMENT_CHARACTERS
    assert " ".join(pieces).split() == text.split()


@pytest.mark.parametrize(
    ("one", "other"),
    [("approval", "approve"), ("capped", "cap"), ("reports", "reported"), ("spending", "spends")],
)
def test_forms_of_a_word_have_one_stem(one: str, other: str) -> None:
    assert stem_word(one) == stem_word(other)


@pytest.mark.parametrize(
    "part",
    ["a", " ", ".", "1", "1-", "a/", "```\n", "```x\n", "never ", "when a, ", "if you ", "Ab ", "A_", "不",
     "a@",
     '"', "A ", "abc. ", "#-", "exit code ", "we wants ", "no ", "only a ", "Error: ", "\n", "\\",
     '"path":"'],
)  # fmt: skip
def test_a_megabyte_of_anything_is_read_in_no_time(part: str) -> None:
    text = part * (1_000_000 // len(part))

    started = time.thread_time()
    read_statements(text)

    assert time.thread_time() - started < 5

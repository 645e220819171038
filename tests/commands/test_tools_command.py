"""`mindrlhf tools` prints a system prompt whose descriptions are JSON."""

import json

from example_tools import CALCULATOR

from mindrlhf.cli import main


def test_the_prompt_describes_the_tools(capsys):
    assert main(["tools", "--names", f"{CALCULATOR}, python", "--instructions", "Be brief."]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Be brief.\n\n# Tools\n\n")
    listed = text[text.index("<tools>\n") + 8 : text.index("\n</tools>")].splitlines()
    assert [json.loads(line)["function"]["name"] for line in listed] == ["calculator", "python"]


def test_an_unknown_tool_is_one_line(capsys):
    assert main(["tools", "--names", "calculater"]) == 2
    assert "unknown tool 'calculater'" in capsys.readouterr().err


def test_the_schemas_are_what_a_chat_template_takes_as_tools(capsys):
    assert main(["tools", "--names", f"{CALCULATOR},python", "--json"]) == 0
    schemas = json.loads(capsys.readouterr().out)
    assert [(one["type"], one["function"]["name"]) for one in schemas] == [
        ("function", "calculator"),
        ("function", "python"),
    ]
    assert schemas[0]["function"]["parameters"]["required"] == ["expression"]

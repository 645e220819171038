"""`mindrlhf tools` prints a system prompt whose descriptions are JSON."""

import json

from example_tools import CALCULATOR

from mindrlhf.cli import main


def test_the_prompt_describes_the_tools_as_chat_templates_take_them(capsys):
    words = ["tools", "--names", f"{CALCULATOR}, python"]
    assert main([*words, "--instructions", "Be brief."]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Be brief.\n\n# Tools\n\n")
    listed = text[text.index("<tools>\n") + 8 : text.index("\n</tools>")].splitlines()
    assert main([*words, "--json"]) == 0
    schemas = json.loads(capsys.readouterr().out)
    assert [json.loads(line) for line in listed] == schemas and {one["type"] for one in schemas} == {"function"}
    assert [one["function"]["name"] for one in schemas] == ["calculator", "python"]
    assert schemas[0]["function"]["parameters"]["required"] == ["expression"]


def test_an_unknown_tool_is_one_line(capsys):
    assert main(["tools", "--names", "calculater"]) == 2
    assert "unknown tool 'calculater'" in capsys.readouterr().err

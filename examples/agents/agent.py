"""An agent with the plain ``openai`` client: it answers with a calculator, and asks a sub-agent the other way round.

As a command it reads the record from standard input and prints its reward; as ``agent.py:agent`` it is a function.
"""

import json
import os
import re
import sys

from openai import OpenAI

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
MAX_TURNS = 3


def calculate(arguments: str) -> str:
    """Return the product that a call asks for, or what is wrong with the call."""
    expression = str(json.loads(arguments).get("expression", ""))
    product = re.fullmatch(r"\s*(\d+)\s*\*\s*(\d+)\s*", expression)
    return str(int(product[1]) * int(product[2])) if product else f"Error: {expression} is no product"


def solve(client: OpenAI, question: str) -> str:
    """Return what the model says at last to a question, in a conversation of its own."""
    messages = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        asked = client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        message = asked.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            answer = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    return ""


def agent(record: dict, base_url: str, api_key: str) -> dict:
    """Return the reward: half of it for the own answer, half for the sub-agent's."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    first, second = re.findall(r"\d+", record["question"])
    own = solve(client, record["question"])
    checked = solve(client, f"What is {second} times {first}?")
    right = [re.findall(r"-?\d+", text)[-1:] == [record["answer"]] for text in (own, checked)]
    return {"reward": sum(right) / 2, "text": own}


if __name__ == "__main__":
    result = agent(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    print(json.dumps(result))

"""Agents of other people's libraries, as these come: each asks the endpoint to double 21, with a tool or as JSON.

``agent`` is started by :mod:`test_agent_clients`; a record's ``client`` names one of ``CLIENTS``.
"""

import json
import os


def double(x: int) -> int:
    """Double a number.

    Args:
        x: the number.
    """
    return 2 * x


ASK = "Double 21."
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOL = {"type": "function", "function": {"name": "double", "description": "Double.", "parameters": PARAMETERS}}


def answer_model():
    """The class of a structured answer."""
    import pydantic

    class Answer(pydantic.BaseModel):
        value: int

    return Answer


def chat_loop(create):
    """Ask with OpenAI's messages until there is no call; ``create`` asks once."""
    messages = [{"role": "user", "content": ASK}]
    while True:
        message = create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            content = str(double(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def openai_(url, key):
    from openai import OpenAI

    return chat_loop(OpenAI(base_url=url, api_key=key).chat.completions.create)


def litellm_(url, key):
    import litellm

    return chat_loop(lambda model, **more: litellm.completion(f"openai/{model}", api_base=url, api_key=key, **more))


def anthropic_(url, key):
    from anthropic import Anthropic

    client = Anthropic(base_url=url.removesuffix("/v1"), api_key=key)
    tool, messages = {"name": "double", "input_schema": PARAMETERS}, [{"role": "user", "content": ASK}]
    while True:
        reply = client.messages.create(model="policy", max_tokens=400, messages=messages, tools=[tool])
        messages.append({"role": "assistant", "content": reply.content})
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            return reply.content[0].text
        results = [{"type": "tool_result", "tool_use_id": one.id, "content": str(double(**one.input))} for one in uses]
        messages.append({"role": "user", "content": results})


def openai_agents(url, key, streams=False, output_type=None):
    import asyncio

    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(AsyncOpenAI(base_url=url, api_key=key))
    agent = agents.Agent("a", model="policy", tools=[agents.function_tool(double)], output_type=output_type)

    async def play():
        if not streams:
            return (await agents.Runner.run(agent, ASK)).final_output
        found = agents.Runner.run_streamed(agent, ASK)
        async for _ in found.stream_events():
            pass
        return found.final_output

    return asyncio.run(play())


def langchain_model(url, key):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="policy", base_url=url, api_key=key)


def langgraph(url, key):
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(langchain_model(url, key), [double])
    return agent.invoke({"messages": [("user", ASK)]})["messages"][-1].content


def langchain(method):
    def play(url, key):
        return langchain_model(url, key).with_structured_output(answer_model(), method=method).invoke(ASK).value

    return play


def langchain_anthropic(url, key):
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model="policy", base_url=url.removesuffix("/v1"), api_key=key, max_tokens=400)
    return model.with_structured_output(answer_model()).invoke(ASK).value


def pydantic_ai(mode=None):
    def play(url, key):
        import pydantic_ai
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=url, api_key=key))
        wrap = {None: lambda one: str, "tool": lambda one: one}.get(mode) or getattr(pydantic_ai, str(mode))
        found = pydantic_ai.Agent(model, output_type=wrap(answer_model()), tools=[double]).run_sync(ASK).output
        return found if mode is None else found.value

    return play


def smolagents(name):
    def play(url, key):
        import smolagents

        model = smolagents.OpenAIModel("policy", api_base=url, api_key=key)
        agent = getattr(smolagents, name)(tools=[smolagents.tool(double)], model=model, max_steps=3, verbosity_level=0)
        return agent.run(ASK)

    return play


def llama_index(url, key):
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike("policy", api_base=url, api_key=key, is_chat_model=True, is_function_calling_model=True)
    return str(model.predict_and_call([FunctionTool.from_defaults(double)], ASK))


def instructor(mode):
    def play(url, key):
        import instructor
        from openai import OpenAI

        client = instructor.from_openai(OpenAI(base_url=url, api_key=key), mode=instructor.Mode[mode])
        messages = [{"role": "user", "content": ASK}]
        made = client.chat.completions.create(model="policy", response_model=answer_model(), messages=messages)
        return made.value

    return play


CLIENTS = {
    "openai": openai_,
    "litellm": litellm_,
    "anthropic": anthropic_,
    "openai-agents": openai_agents,
    "openai-agents streamed": lambda *to: openai_agents(*to, streams=True),
    "openai-agents typed": lambda *to: openai_agents(*to, output_type=answer_model()).value,
    "langgraph": langgraph,
    **{f"langchain {method}": langchain(method) for method in ("json_schema", "function_calling", "json_mode")},
    "langchain-anthropic": langchain_anthropic,
    "pydantic-ai": pydantic_ai(),
    **{f"pydantic-ai {mode}": pydantic_ai(mode) for mode in ("tool", "NativeOutput", "PromptedOutput")},
    **{f"smolagents {name}": smolagents(name) for name in ("CodeAgent", "ToolCallingAgent")},
    **{f"instructor {mode}": instructor(mode) for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON")},
    "llama-index": llama_index,
}


def agent(record, base_url, api_key):
    """Play a record's client; return whether it has found 42."""
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    return float("42" in str(CLIENTS[record["client"]](base_url, api_key)))

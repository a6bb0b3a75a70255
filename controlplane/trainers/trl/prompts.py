"""What a request asks of an engine, by TRL's configuration."""

from typing import Any


def prompt_ids(prompt: Any, tokenizer: Any, args: Any) -> list[int]:
    """Token ids of a prompt: of a plain string, or of messages by the tokenizer's chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    templated = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **(args.chat_template_kwargs or {})
    )
    return list(templated["input_ids"])


def sampling(args: Any) -> dict[str, Any]:
    """The fields of a request that TRL's configuration asks for."""
    fields = {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
    }
    chosen = {name: value for name, value in fields.items() if value is not None}
    return chosen | (getattr(args, "generation_kwargs", None) or {})

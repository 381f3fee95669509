"""The engine: requests arrive over time, stream, and leave as soon as they are done."""

from __future__ import annotations

import selective_compile as sc
from selective_compile import tiny_model
from selective_compile.runtime import StepRecord


def main(compile: bool = True) -> dict[str, str]:
    """Returns the answers by request id."""
    model, tokenizer = tiny_model.load()
    records: list[StepRecord] = []
    config = sc.EngineConfig(token_budget=16, compile=compile)
    engine = sc.Engine(model, config, observers=[records.append])

    def submit(name: str, prompt: str, **options: object) -> sc.Request:
        return engine.submit(tokenizer(prompt).input_ids, request_id=name, **options)

    letters = submit("letters", "letters a to m:", max_new_tokens=60)
    engine.step()  # its prompt, of 16 tokens, goes in at once
    story = "ann has 12 figs and gets 5 more. now ann has"
    shopping = submit("shopping", story, max_new_tokens=9)  # 45 tokens: three chunks, beside the letters
    endless = submit("endless", "the key is", max_new_tokens=500, do_sample=True, seed=1)
    for _ in range(10):
        engine.step()
    endless.cancel()

    print("shopping: ", end="")
    for token in shopping:  # reading from a request runs the engine, for all requests
        print(tokenizer.decode(token, skip_special_tokens=True), end="", flush=True)
    print()

    with engine.running():  # or a thread of its own runs it, and submit may be called from any thread
        late = submit("late", "12+7=", max_new_tokens=5)
        answers = {r.request_id: r.result(timeout=60) for r in (letters, shopping, endless, late)}
    for name, result in answers.items():
        text = tokenizer.decode(result.tokens, skip_special_tokens=True)
        print(f"{name:>9}: {text!r} ({result.finish_reason}, {result.timing.total:.2f} s)")

    for record in records[:5]:
        shares = ", ".join(f"{share.tokens} of {share.request_id}" for share in record.shares)
        print(f"step {record.step}: {shares}")
    print(engine.stats())
    return {str(n): tokenizer.decode(a.tokens, skip_special_tokens=True) for n, a in answers.items()}


if __name__ == "__main__":
    main()

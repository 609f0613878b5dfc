"""Of what requests may ask for: area VA."""

from __future__ import annotations

from tests.mutations import Mutation

ADMISSION = "jaxserve/engine/admission.py"
PARSE = "jaxserve/server/parse.py"
TEMPLATE = "jaxserve/chat_template.py"
VALIDATE = "jaxserve/server/validate.py"

MUTATIONS = {
    "VA02": Mutation(ADMISSION, "if not 0 <= token < info.vocab_size:", "if token < 0:"),
    "VA05": Mutation("jaxserve/request.py", "INT64 = range(-(2**63), 2**63)", "INT64 = range(-(2**63), 2**64)"),
    # The engine is asked for no tokens.
    "VA06": Mutation(VALIDATE, "if sampling.max_tokens == 0 and", "if sampling.max_tokens == -1 and"),
    # An error tells of tokens below nought.
    "VA07": Mutation(ADMISSION, "but the prompt has {prompt_len} tokens", "which leaves {limit - prompt_len} tokens"),
    # A prompt that is too long is let in.
    "VA09": Mutation(ADMISSION, "if prompt_len + least > limit:", "if prompt_len + least > 10 * limit:"),
    # Of several prompts, one that is too long is left out.
    "VA13": Mutation(
        VALIDATE,
        "for number, prompt in enumerate(prompts)",
        "for number, prompt in enumerate(prompts) if len(prompt.token_ids) < info.max_model_len",
    ),
    "VA15": Mutation("jaxserve/request.py", '"top_p": (0.0, 1.0)', '"top_p": (1e-9, 1.0)'),
    # Any JSON is taken for an object.
    "VA16": Mutation(PARSE, "if not isinstance(value, dict):", "if value is None:"),
    "VA17": Mutation(PARSE, "if not content_type:", 'if content_type == "":'),
    # What a template says is an inner fault.
    "VA21": Mutation(TEMPLATE, "except Exception as error:", "except TypeError as error:"),
    # A template refuses, and nobody is told why.
    "VA22": Mutation(TEMPLATE, "refuses these messages: {kind}{error}", "refuses these messages: {kind}"),
    # Requests go by ids that others may have.
    "VA24": Mutation(
        "jaxserve/server/openai.py", "request_id, config, info = new_id(kind),", "request_id, config, info = kind,"
    ),
    "VA25": Mutation(VALIDATE, "if not 1 <= n <= config.max_choices:", "if n < 1:"),
    # The best answers are those of the last prompt.
    "VA28": Mutation("jaxserve/server/generation.py", "best += sorted(", "best = sorted("),
}

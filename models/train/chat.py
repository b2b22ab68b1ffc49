"""The chat format: ChatML, as the template in the GGUF file writes it."""
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

TEMPLATE = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def render(turns, generate=False):
    text = "".join(f"{START}{role}\n{content}{END}\n" for role, content in turns)
    return text + f"{START}assistant\n" if generate else text

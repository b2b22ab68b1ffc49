"""Makes JSON Schemas with a value that satisfies each, from a seed: for test programs. Needs only Python's standard library."""

import math
import random

NAMES = ["id", "name", "size", "tags", "in", "items", "itemsTotal", "unit_price", "x-y", "größe", "a b", "value", "val"]
TEXTS = ["", "a", "Anna", "no. 7", "über", "a, b: c", "{x}", "two words", "日本", "0", "-1", "x" * 40]
PATTERNS = [("^[a-z]{2,5}$", "abc"), ("^\\d{3}-\\d{2}$", "123-45"), ("^(GET|POST|PUT)$", "POST"), ("^v[0-9]+(\\.[0-9]+)*$", "v1.20.3")]
FORMATS = [("date", "2024-02-29"), ("uuid", "2eb8aa08-aa98-11ea-b4aa-73b441d16380"), ("ipv4", "192.168.0.1"), ("time", "12:30:05Z")]


class Maker:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def document(self):
        """A schema, and a value that satisfies it; objects have their members in the order of the schema."""
        self.recursive = self.random.random() < 0.15
        schema, value = self.any(3)
        if self.recursive:
            node = {"type": "object", "properties": {"value": schema, "next": {"$ref": "#/$defs/node"}}, "required": ["value"],
                    "additionalProperties": False}
            schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
            value = {"value": value, "next": {"value": value}}
        return schema, value

    def any(self, depth):
        kinds = [self.text, self.text, self.integer, self.number, self.literal, self.choice]
        if depth > 0:
            kinds += [self.object, self.object, self.object, self.array, self.array, self.either]
        return self.random.choice(kinds)(depth)

    def text(self, _):
        r = self.random.random()
        if r < 0.3:
            return {"type": "string"}, self.random.choice(TEXTS)
        if r < 0.5:
            pattern, value = self.random.choice(PATTERNS)
            return {"type": "string", "pattern": pattern}, value
        if r < 0.6:
            name, value = self.random.choice(FORMATS)
            return {"type": "string", "format": name}, value
        value = self.random.choice(TEXTS)
        least, most = self.random.randint(0, len(value)), len(value) + self.random.choice([0, 1, 5, 100])
        return {"type": "string", "minLength": least, "maxLength": most}, value

    def integer(self, _):
        value = self.random.choice([0, 1, -1, 7, 42, -100, 65535, 2428])
        schema = {"type": "integer"}
        if self.random.random() < 0.5:
            schema["minimum"] = value - self.random.choice([0, 1, 17, 1000])
        if self.random.random() < 0.5:
            schema["maximum"] = value + self.random.choice([0, 1, 17, 1000])
        return schema, value

    def number(self, _):
        value = self.random.choice([0, 0.5, -1.25, 3, 1000.125])
        schema = {"type": "number"}
        if self.random.random() < 0.4:
            schema["minimum"] = math.floor(value) - self.random.choice([0, 1, 10])
        if self.random.random() < 0.4:
            schema["maximum"] = math.ceil(value) + self.random.choice([0, 1, 10])
        return schema, value

    def literal(self, _):
        value = self.random.choice([True, False, None])
        return ({"type": "null"}, None) if value is None else ({"type": "boolean"}, value)

    def choice(self, _):
        values = self.random.sample(["red", "red green", "re", 1, 12, -3.5, None, True], self.random.randint(1, 5))
        value = self.random.choice(values)
        return ({"const": value} if len(values) == 1 else {"enum": values}), value

    def array(self, depth):
        items, value = self.any(depth - 1)
        count = self.random.randint(0, 3)
        schema = {"type": "array", "items": items}
        if self.random.random() < 0.4:
            schema["minItems"] = self.random.randint(0, count)
        if self.random.random() < 0.4:
            schema["maxItems"] = count + self.random.randint(0, 2)
        return schema, [value] * count

    def object(self, depth):
        schema = {"type": "object", "properties": {}, "required": []}
        value = {}
        for name in self.random.sample(NAMES, self.random.randint(1, 5)):
            schema["properties"][name], own = self.any(depth - 1)
            needed = self.random.random() < 0.5
            if needed:
                schema["required"].append(name)
            if needed or self.random.random() < 0.5:
                value[name] = own
        r = self.random.random()
        if r < 0.6:
            schema["additionalProperties"] = False
        elif r < 0.8:
            schema["additionalProperties"], value["other"] = self.any(0)
        return schema, value

    def either(self, depth):
        schema, value = self.any(depth - 1)
        other, _ = self.any(depth - 1)
        return {"anyOf": self.random.sample([schema, other], 2)}, value

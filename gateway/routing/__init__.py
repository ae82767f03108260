"""Which of a model's backends a request goes to. docs/routing.md has the rule and the figures.

`policies` order the candidates and pick one, `health` says which are out, `router` holds both and decides; all three are pure.
`gateway.engine.dispatcher` sends requests where they decide, takes what failed elsewhere, and sends the copies.
"""

"""The conformance kit: for authors of plugins, and for our own tests.

`fake`            a backend without model math whose ids prove that the schedule was right
`fake_checkpoint` a model folder for it, and its plugin
`plans`           hand-written steps: a small scheduler over a `LoadedModel`
`suite`           `BackendSuite`, `ModelSuite`: pytest classes to subclass (these need pytest)
`plugins`         `check_plugin`
"""

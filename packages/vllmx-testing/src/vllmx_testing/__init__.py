"""Conformance suites, fakes and the CUDA emulator, for plugin authors and our own tests.

`fake`            a backend without model math whose ids prove that the schedule was right
`fake_checkpoint` a model folder for it, and its plugin
`plan_check`      whether a `StepPlan` keeps its contract
`plans`           hand-written steps: a small scheduler over a `LoadedModel`
`synthetic`       small models with random weights
`backend_suite`   `BackendSuite`: pytest tests that a backend's author subclasses
`model_suite`     `ModelSuite`: the same for an architecture
`plugins`         `check_plugin`
`cuda`            vllmx-cuda's kernels without a GPU
"""

__version__ = "0.1.0"

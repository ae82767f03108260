"""What a model may write where it gave no array. Knows PyTorch's tensors without PyTorch."""


def no_array(value: object) -> str:
    """What is wrong with it as an output, and what helps, whatever may be in the way of `numpy.asarray`, which raises then."""
    return f"expected an array, the model gave {type(value).__name__}: {_remedy_for(value)}"


def _remedy_for(value: object) -> str:
    if not hasattr(value, "requires_grad"):
        return "return it as numpy.asarray(…)"
    device, dtype, layout = (str(getattr(value, name, "")) for name in ("device", "dtype", "layout"))
    if device == "meta":
        return "it is on the device meta, where tensors have no values"
    calls = ".detach()" if getattr(value, "requires_grad", False) else ""
    calls += ".cpu()" if device != "cpu" else ""
    calls += ".resolve_neg()" if getattr(value, "is_neg", bool)() else ""
    calls += ".to_dense()" if layout != "torch.strided" else ""
    calls += ".float()" if dtype == "torch.bfloat16" else ""
    return f"return it as …{calls}.numpy()"

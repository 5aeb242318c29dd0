"""The mean and deviation that a run normalises its images with: of flags, the resumed run, its encoder, or the data."""

from collections.abc import Mapping, Sequence
from typing import Any

from util.data.images import Images
from util.data.pixel_format import RGB8, declares_invalid
from util.data.statistics import Statistics, find_statistics, keep_colors, statistics_of
from util.run.start.run import Run


def choose_statistics(
    run: Run, images: Images, encoder: Mapping[str, Any], rgb_bands: Sequence[int] | None
) -> Statistics:
    """Returns the pixel statistics of the run: see `util.data.statistics`. All ranks must call it.

    encoder: pixel settings of the first weights. rgb_bands: which bands hold red, green and blue for them, if they
    are for RGB and the images have other bands.
    """
    known: Mapping[str, Any] | None = None
    if run.resumed is not None:
        known = run.resumed.pixel_settings
    elif encoder and not rgb_bands:
        known = encoder
    if declares_invalid(encoder):
        from util.data.invalid_pixels import note_on_encoder

        run.note(*note_on_encoder(encoder, vars(run.args)))
    given = (run.args.mean, run.args.std)
    statistics, notes = statistics_of(given, known, images)
    has_8_bits = images.pixel_format.dtype == "uint8" and encoder.get("pixels") in (None, "uint8")
    of_rgb = find_statistics(encoder, RGB8)
    if encoder and rgb_bands and of_rgb and given == (None, None) and has_8_bits:
        statistics = keep_colors(of_rgb, statistics, rgb_bands)
    run.note(*notes)
    run.watchdog.set_up("model")
    return statistics

package policy

import (
	"math"
	"strconv"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/internal/timezone"
)

// decoder reads values from a file's nodes and collects their mistakes.
type decoder struct {
	*strictyaml.Decoder
	zones timezone.Cache // so that a file that names a zone often has it once
}

// Bounds of the sizes in a file, in bytes.
const (
	minSize = 64 << 10
	maxSize = 1 << 50
)

// size reads an amount of memory: text such as 64MiB, or a number of bytes.
func (d *decoder) size(f strictyaml.Field) int64 {
	text, ok := d.Scalar(f, "an amount of memory such as 64MiB", "!!str", "!!int")
	v, err := humanize.ParseBytes(text)
	if ok && (err != nil || v < minSize || v > maxSize) {
		d.Fail(f.Node, f.Path, "%s is not an amount of memory from 64KiB to 1PiB, such as 64MiB", strictyaml.Show(text))
	}
	return int64(v)
}

// share reads a part of a limit, above 0 and at most 1. It returns it in millionths, rounded.
func (d *decoder) share(f strictyaml.Field) int64 {
	text, ok := d.Scalar(f, "a number above 0 and at most 1, such as 0.8 for 80 % of the limit", "!!float", "!!int")
	v, err := strconv.ParseFloat(text, 64)
	millionths := int64(math.Round(v * WarnAtWhole))
	if ok && (err != nil || !(v > 0 && v <= 1) || millionths == 0) {
		d.Fail(f.Node, f.Path, "%s is not between 0.000001 and 1: write 0.8 for 80 %% of the limit",
			strictyaml.Show(text))
	}
	return millionths
}

// duration reads a window or a ttl.
func (d *decoder) duration(f strictyaml.Field) time.Duration {
	text, ok := d.Scalar(f, "a duration, which has a number and a unit, such as 90s or 1d12h", "!!str")
	if !ok {
		return 0
	}
	v, err := ParseDuration(text)
	if err == nil {
		err = checkWindow(v)
	}
	if err != nil {
		d.Fail(f.Node, f.Path, "%v", err)
	}
	return v
}

// zone reads a time zone. It returns nil for UTC, as algo.Limit wants it.
func (d *decoder) zone(f strictyaml.Field) *time.Location {
	name, ok := d.Text(f, 0, strictyaml.MaxFile)
	if !ok {
		return nil
	}
	zone, err := d.zones.Load(name)
	if err != nil {
		d.Fail(f.Node, f.Path, "%v", err)
	}
	if zone == time.UTC {
		return nil
	}
	return zone
}

// Error is one mistake in a policy file, and Errors are all of them.
type (
	Error  = strictyaml.Error
	Errors = strictyaml.Errors
)

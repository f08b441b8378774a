package policy

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/weirlimit/weir/algo"
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
func (d *decoder) size(f strictyaml.Field) (int64, bool) {
	text, ok := d.Scalar(f, "an amount of memory such as 64MiB", "", "!!str", "!!int")
	if !ok {
		return 0, false
	}
	v, err := humanize.ParseBytes(text)
	if err != nil || v < minSize || v > maxSize {
		d.Fail(f.Node, f.Path, "%s is not an amount of memory from 64KiB to 1PiB, such as 64MiB", strictyaml.Show(text))
		return 0, false
	}
	return int64(v), true
}

// share reads a part of a limit, above 0 and at most 1. It returns it in millionths, rounded.
func (d *decoder) share(f strictyaml.Field) (int64, bool) {
	text, ok := d.Scalar(f, "a number above 0 and at most 1, such as 0.8 for 80 % of the limit", "", "!!float", "!!int")
	if !ok {
		return 0, false
	}
	v, err := strconv.ParseFloat(text, 64)
	millionths := int64(math.Round(v * WarnAtWhole))
	if err != nil || !(v > 0 && v <= 1) || millionths == 0 {
		d.Fail(f.Node, f.Path, "%s is not between 0.000001 and 1: write 0.8 for 80 %% of the limit",
			strictyaml.Show(text))
		return 0, false
	}
	return millionths, true
}

// duration reads a window or a ttl.
func (d *decoder) duration(f strictyaml.Field) (time.Duration, bool) {
	text, ok := d.Scalar(f, "a duration", ": "+durationHint, "!!str")
	if !ok {
		return 0, false
	}
	v, err := ParseDuration(text)
	if err == nil {
		err = checkWindow(v)
	} else if _, period := algo.ParsePeriod(text); period {
		err = fmt.Errorf("%q is a calendar period: add align: calendar to a fixed_window, or write a duration such as 24h", text)
	}
	if err != nil {
		d.Fail(f.Node, f.Path, "%v", err)
	}
	return v, err == nil
}

// zone reads a time zone. It returns nil for UTC, as algo.Limit wants it.
func (d *decoder) zone(f strictyaml.Field) (*time.Location, bool) {
	name, ok := d.Text(f)
	if !ok {
		return nil, false
	}
	zone, err := d.zones.Load(name)
	if err != nil {
		d.Fail(f.Node, f.Path, "%v", err)
		return nil, false
	}
	if zone == time.UTC {
		zone = nil
	}
	return zone, true
}

// otherName returns the field for a name that other limiters use, or "".
func otherName(name string) string {
	switch strings.ToLower(name) {
	case "rate", "requests", "max", "quota":
		return "limit"
	case "interval", "period", "duration", "per":
		return "window"
	case "burst", "max_burst":
		return "capacity"
	case "lease", "lease_ttl":
		return "ttl"
	case "timezone", "tz", "zone":
		return "time_zone"
	}
	return ""
}

// Error is one mistake in a policy file, and Errors are all of them.
type (
	Error  = strictyaml.Error
	Errors = strictyaml.Errors
)

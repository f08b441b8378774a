package settings

import (
	"fmt"
	"strconv"

	"github.com/dustin/go-humanize"
)

// Auto is the value of a setting that follows from the memory there is.
const Auto = "auto"

// Value is a flag whose text is looked at when it is set, so that what is wrong with it is said of the place where it was
// set: the command line, the environment, a line of the file.
type Value[T any] struct {
	Text, kind string
	Value      T
	parse      func(string) (T, error)
}

// Of makes p ready for use; the default must be right.
func (p *Value[T]) Of(parse func(string) (T, error), kind, text string) *Value[T] {
	p.parse, p.kind = parse, kind
	if err := p.Set(text); err != nil {
		panic("settings: default of a flag: " + err.Error())
	}
	return p
}

// Set implements pflag.Value.
func (p *Value[T]) Set(text string) (err error) {
	p.Text = text
	p.Value, err = p.parse(text)
	return err
}

// String implements pflag.Value.
func (p *Value[T]) String() string { return p.Text }

// Type implements pflag.Value.
func (p *Value[T]) Type() string { return p.kind }

// ParseKeys reads a number of keys; 0 is no bound.
func ParseKeys(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%q is not a whole number of keys", s)
	}
	return n, nil
}

// ParseInlineMemory reads an amount of memory, or 0 for no bound.
func ParseInlineMemory(s string) (int64, error) {
	if s == "0" {
		return 0, nil
	}
	return ParseSize(64<<10, 1<<50)(s)
}

// AutoOr returns a parser that reads auto as 0, and leaves the rest to another.
func AutoOr[T any](parse func(string) (T, error)) func(string) (T, error) {
	return func(s string) (value T, err error) {
		if s == Auto {
			return value, nil
		}
		return parse(s)
	}
}

// ParseCount returns a parser of numbers within bounds, and of auto, which is 0.
func ParseCount(least, most int) func(string) (int, error) {
	return AutoOr(func(s string) (int, error) {
		n, err := strconv.Atoi(s)
		if err != nil || n < least || n > most {
			return 0, fmt.Errorf("%q is neither auto nor a number from %d to %d", s, least, most)
		}
		return n, nil
	})
}

// ParseSize returns a parser of amounts of memory within bounds.
func ParseSize(least, most uint64) func(string) (int64, error) {
	return func(s string) (int64, error) {
		n, err := humanize.ParseBytes(s)
		if err != nil || n < least || n > most {
			return 0, fmt.Errorf("%q is not a size from %s to %s", s, humanize.IBytes(least), humanize.IBytes(most))
		}
		return int64(n), nil
	}
}

package node

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/weirlimit/weir/internal/admission"
)

// Auto is the text of a setting that follows from the available memory.
const Auto = "auto"

// Setting is a field of Config, or of a struct that has one, with the tag flag. The tags of a setting are:
//
//	flag     its name as a flag; in the environment it is WEIR_NAME
//	help     what it is for
//	default  the text that stands for the default
//	unit     size, memory or int: how a number is written; a Port and a time.Duration have their own forms
//	range    the least and the most of a number, as in "1s..1m"
//	zero     "none": the text 0 stands for no bound or for none, which is the number -1
//
// The number 0 stands for the default, unless it is a Port. A Setting of a number implements pflag.Value.
type Setting struct {
	Name, Help, Default string
	// Field points to the field: *string, *[]string, *bool, *float64, or another pointer to a number.
	Field any

	number reflect.Value
	tag    reflect.StructTag
	text   string
}

// Settings returns the settings of the struct that of points to, and of the structs in it. The flags of numbers show
// their defaults.
func Settings(of any) (all []*Setting) {
	v := reflect.ValueOf(of).Elem()
	for i := range v.NumField() {
		field, about := v.Field(i), v.Type().Field(i)
		name, ok := about.Tag.Lookup("flag")
		if !ok {
			if field.Kind() == reflect.Struct && about.IsExported() {
				all = append(all, Settings(field.Addr().Interface())...)
			}
			continue
		}
		s := &Setting{Name: name, Help: about.Tag.Get("help"), Default: about.Tag.Get("default"),
			Field: field.Addr().Interface(), number: field, tag: about.Tag}
		s.text = s.Default
		all = append(all, s)
	}
	return all
}

// Numeric reports whether the setting is a whole number, a duration or a port.
func (s *Setting) Numeric() bool { return s.number.CanInt() }

// Set implements pflag.Value.
func (s *Setting) Set(text string) error {
	n, err := s.parse(text)
	if err != nil {
		return err
	}
	s.text = text
	s.number.SetInt(n)
	return nil
}

// String implements pflag.Value.
func (s *Setting) String() string { return s.text }

// Type implements pflag.Value.
func (s *Setting) Type() string {
	switch s.Field.(type) {
	case *Port:
		return "port"
	case *time.Duration:
		return "duration"
	case *int64:
		if unit := s.tag.Get("unit"); unit != "" {
			return unit
		}
	}
	return "int"
}

// parse parses a number and checks its range.
func (s *Setting) parse(text string) (int64, error) {
	switch kind := s.Type(); {
	case kind == "port":
		n, err := strconv.ParseUint(text, 10, 16)
		switch {
		case text == "":
			return int64(PortOff), nil
		case err != nil:
			return 0, fmt.Errorf("%q is not a port, 0 to 65535, or empty to turn it off", text)
		case n == 0:
			return int64(PortAny), nil
		}
		return int64(n), nil
	case kind == "memory":
		return admission.ParseMemory(text)
	case text == Auto && s.Default == Auto:
		return 0, nil
	}
	n, err := s.read(text)
	if n == 0 && err == nil && s.tag.Get("zero") == "none" {
		return -1, nil
	}
	if err != nil || n < 0 || !s.within(n) && !(n == 0 && s.Default == "0") {
		return 0, s.mistake(strconv.Quote(text))
	}
	return n, nil
}

// read parses a number in the setting's unit.
func (s *Setting) read(text string) (int64, error) {
	switch s.Type() {
	case "duration":
		d, err := time.ParseDuration(text)
		return int64(d), err
	case "size":
		n, err := humanize.ParseBytes(text)
		return int64(min(n, 1<<62)), err
	}
	return strconv.ParseInt(text, 10, map[reflect.Kind]int{reflect.Int: 32, reflect.Int64: 64}[s.number.Kind()])
}

// within reports whether a number is in the range.
func (s *Setting) within(n int64) bool {
	least, most, _ := strings.Cut(s.tag.Get("range"), "..")
	if low, err := s.read(least); err == nil && n < low {
		return false
	}
	high, err := s.read(most)
	return err != nil || n <= high
}

// mistake returns the error for an invalid value.
func (s *Setting) mistake(value string) error {
	what := map[string]string{"port": "a port", "int": "a number", "duration": "a time, such as 1m30s",
		"size": "a size, such as 64KiB", "memory": "an amount"}[s.Type()]
	least, most, _ := strings.Cut(s.tag.Get("range"), "..")
	switch {
	case most != "":
		what += ", from " + least + " to " + most
	case least != "":
		what += ", " + least + " or more"
	}
	return fmt.Errorf("%s is not %s", value, what)
}

// checkNumbers returns an error for the first number out of its range.
func checkNumbers(settings []*Setting) error {
	for _, s := range settings {
		if !s.Numeric() {
			continue
		}
		n := s.number.Int()
		_, port := s.Field.(*Port)
		switch {
		case n == 0, n == -1 && (port || s.tag.Get("zero") == "none"):
		case n < 0, port && n > 65535, !s.within(n):
			return fmt.Errorf("%s: %w", s.Name, s.mistake(fmt.Sprint(s.number.Interface())))
		}
	}
	return nil
}

// setDefaults sets numbers that are zero to their defaults, except those that follow from the memory.
func setDefaults(settings []*Setting) {
	for _, s := range settings {
		if s.Numeric() && s.number.IsZero() && s.Type() != "port" && s.Default != Auto {
			_ = s.Set(s.Default) // TestDefaults checks that Default is valid
		}
	}
}

package cli

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v4"

	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/internal/strictyaml"
)

// registerSettings adds a flag for each setting of the struct that of points to.
func registerSettings(flags *pflag.FlagSet, of any) {
	for _, s := range node.Settings(of) {
		switch to := s.Field.(type) {
		case *string:
			flags.StringVar(to, s.Name, s.Default, s.Help)
		case *[]string:
			flags.StringSliceVar(to, s.Name, nil, s.Help)
		case *bool:
			flags.BoolVar(to, s.Name, false, s.Help)
		case *float64:
			number, _ := strconv.ParseFloat(s.Default, 64) // TestDefaults checks that it is a number
			flags.Float64Var(to, s.Name, number, s.Help)
		default:
			_ = s.Set(s.Default) // TestDefaults checks it
			flags.Var(s, s.Name, s.Help)
		}
	}
}

// fillFlags sets every flag that the command line has not set: from the environment (WEIR_HTTP_PORT for --http-port),
// or else from the YAML file of --config (http-port: 8080).
func fillFlags(flags *pflag.FlagSet, getenv func(string) (string, bool)) error {
	fromEnv := func(f *pflag.Flag) error {
		name := "WEIR_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		v, ok := getenv(name)
		if !ok || f.Changed || f.Name == "help" {
			return nil
		}
		if err := flags.Set(f.Name, v); err != nil {
			return fmt.Errorf("%s (environment): %w", name, err)
		}
		return nil
	}
	var errs []error
	flags.VisitAll(func(f *pflag.Flag) { errs = append(errs, fromEnv(f)) })
	if err := errors.Join(errs...); err != nil {
		return err
	}
	f := flags.Lookup("config")
	if f == nil || f.Value.String() == "" {
		return nil
	}
	data, err := reload.ReadFile(f.Value.String(), maxConfig)
	if err != nil {
		return fmt.Errorf("config: %w", err)
	}
	return fillFromYAML(flags, f.Value.String(), data)
}

// unknownVariables returns the variables of an environment that begin like settings and are none, such as misspelt
// ones.
func unknownVariables(flags *pflag.FlagSet, environ []string) []string {
	var unknown []string
	for _, v := range environ {
		name, _, _ := strings.Cut(v, "=")
		setting, ok := strings.CutPrefix(name, "WEIR_")
		if ok && flags.Lookup(strings.ToLower(strings.ReplaceAll(setting, "_", "-"))) == nil {
			unknown = append(unknown, name)
		}
	}
	return unknown
}

// maxConfig is the largest size of a file with settings, in bytes.
const maxConfig = 1 << 20

// fillFromYAML sets the flags that are not set from a file's content.
func fillFromYAML(flags *pflag.FlagSet, file string, data []byte) error {
	d := strictyaml.New(file, data)
	var known []string
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Name != "config" && f.Name != "help" {
			known = append(known, f.Name, strings.ReplaceAll(f.Name, "-", "_"))
		}
	})
	fields, _ := d.Fields(d.Root(), known)
	seen := make(map[string]bool)
	for _, one := range fields.List {
		f := flags.Lookup(strings.ReplaceAll(one.Name, "_", "-"))
		if seen[f.Name] {
			d.Fail(one.Key, one.Path, "is given twice")
		} else if !f.Changed && one.Node != nil {
			set(d, flags, f, one)
		}
		seen[f.Name] = true
	}
	var errs []error
	for _, e := range d.Sorted() {
		errs = append(errs, fmt.Errorf("config: %w", e))
	}
	return errors.Join(errs...)
}

// set sets a flag to the value of a field: a scalar's text, or the elements of a list.
func set(d *strictyaml.Decoder, flags *pflag.FlagSet, f *pflag.Flag, one strictyaml.Field) {
	text := one.Node.Value
	switch {
	case one.Node.Kind == yaml.SequenceNode && f.Value.Type() == "stringSlice":
		var list []string
		if err := one.Node.Decode(&list); err != nil {
			d.Fail(one.Node, one.Path, "a list of texts is expected")
			return
		}
		text = strings.Join(list, ",")
	case one.Node.Kind != yaml.ScalarNode:
		d.Fail(one.Node, one.Path, "a single value is expected, not %s", strictyaml.Kind(one.Node))
		return
	}
	if err := flags.Set(f.Name, text); err != nil {
		d.Fail(one.Node, one.Path, "%v", err)
	}
}

// flagged returns an error's text. In lines that begin with the names of settings, it puts -- before the names.
func flagged(flags *pflag.FlagSet, err error) string {
	var b strings.Builder
	for line := range strings.Lines(err.Error()) {
		names, rest, _ := strings.Cut(line, ": ")
		list := strings.Split(names, ", ")
		if rest != "" && !slices.ContainsFunc(list, func(name string) bool { return flags.Lookup(name) == nil }) {
			line = "--" + strings.Join(list, ", --") + ": " + rest
		}
		b.WriteString(line)
	}
	return b.String()
}

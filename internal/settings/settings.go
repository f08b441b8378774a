// Package settings fills a command's flags from the environment and from a YAML file, so that a setting has one name in all three.
//
// It knows no setting but config, which names the file.
package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/weirlimit/weir/internal/file"
)

// Fill gives every flag that the command line left alone its value from the environment (WEIR_HTTP_PORT for
// --http-port) or, failing that, from the YAML file that --config names (http-port: 8080). Flag, environment, file: the
// first that says something counts.
func Fill(flags *pflag.FlagSet, getenv func(string) (string, bool)) error {
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
	return fillFromFile(flags, f.Value.String())
}

// Unknown lists the variables of an environment that begin like settings and are none, such as misspelt ones.
func Unknown(flags *pflag.FlagSet, environ []string) []string {
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

// maxConfig is the size in bytes of the largest file with settings.
const maxConfig = 1 << 20

func fillFromFile(flags *pflag.FlagSet, name string) error {
	data, err := file.Read(name, maxConfig)
	if err != nil {
		return fmt.Errorf("config: %w", err)
	}
	return fillFromYAML(flags, name, data)
}

// fillFromYAML sets the flags that have not been set by what a file of the given name holds.
func fillFromYAML(flags *pflag.FlagSet, file string, data []byte) error {
	var doc, more yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(data))
	switch err := dec.Decode(&doc); {
	case err == io.EOF:
		return nil // an empty file
	case err != nil:
		return fmt.Errorf("config: %s: %w", file, err)
	}
	if err := dec.Decode(&more); err != io.EOF {
		return fmt.Errorf("config: %s: holds more than one document, or what follows the first is not YAML", file)
	}
	top := doc.Content[0]
	if top.Kind == yaml.ScalarNode && top.Tag == "!!null" {
		return nil
	}
	if top.Kind != yaml.MappingNode {
		return fmt.Errorf("config: %s:%d:%d: settings are written as name: value, with the names of the flags", file, top.Line, top.Column)
	}
	var errs []error
	fail := func(n *yaml.Node, format string, args ...any) {
		errs = append(errs, fmt.Errorf("config: %s:%d:%d: "+format, append([]any{file, n.Line, n.Column}, args...)...))
	}
	seen := make(map[string]bool)
	for i := 0; i+1 < len(top.Content); i += 2 {
		key, value := top.Content[i], top.Content[i+1]
		name := strings.ReplaceAll(key.Value, "_", "-")
		f := flags.Lookup(name)
		switch {
		case f == nil || name == "config" || name == "help":
			fail(key, "%s: there is no such setting", key.Value)
			continue
		case seen[name]:
			fail(key, "%s: is given twice", key.Value)
			continue
		}
		seen[name] = true
		if f.Changed {
			continue // the command line or the environment said so
		}
		var text string
		switch value.Kind {
		case yaml.ScalarNode:
			if text = value.Value; value.Tag == "!!null" {
				fail(value, `%s: has no value; write "" where an empty one is meant`, key.Value)
				continue
			}
		case yaml.SequenceNode:
			if f.Value.Type() != "stringSlice" {
				fail(value, "%s: takes a single value, not a list", key.Value)
				continue
			}
			var list []string
			if err := value.Decode(&list); err != nil {
				fail(value, "%s: a list of texts is expected", key.Value)
				continue
			}
			text = strings.Join(list, ",")
		default:
			fail(value, "%s: a single value or a list is expected", key.Value)
			continue
		}
		if err := flags.Set(name, text); err != nil {
			fail(value, "%s: %w", key.Value, err)
		}
	}
	return errors.Join(errs...)
}

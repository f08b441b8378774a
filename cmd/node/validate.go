package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/gateway/envoy"
	"github.com/weirlimit/weir/internal/file"
	"github.com/weirlimit/weir/internal/limitador"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/policy"
)

func newValidate() *cobra.Command {
	var output, convert string
	var merge bool
	cmd := &cobra.Command{
		Use:   "validate FILE...",
		Short: "Check policy files, files for Envoy and Limitador's: every mistake with file, line and column",
		Long: `Check policy files without a node: every mistake with file, line and column. A file with a domain or
descriptors is read in the format of envoyproxy/ratelimit, and a directory is that of --envoy-config. A list of limits with
namespaces is Limitador's: --convert DIR writes it in the format of envoyproxy/ratelimit. What depends on the
node that reads the file is a warning on standard error: strict policies need one with --voters.
Exit status: 0 no mistakes, 1 mistakes, 2 a file cannot be read.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("FILE: give at least one file")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, files []string) error {
			if output != "text" && output != "json" {
				return fmt.Errorf("--output: %q is not one of text and json", output)
			}
			return validate(cmd.OutOrStdout(), cmd.ErrOrStderr(), files, merge, convert, output)
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "how to print the result: text or json")
	cmd.Flags().StringVar(&convert, "convert", "", "`DIR` to write Limitador's limits to as files for --envoy-config, one for each namespace; files that are there are not overwritten")
	cmd.Flags().BoolVar(&merge, "envoy-merge-domains", false, "let several files for Envoy describe one domain")
	return cmd
}

// mistake is a strictyaml.Error as JSON shows it.
type mistake struct {
	File    string `json:"file"`
	Line    int    `json:"line"`
	Column  int    `json:"column"`
	Field   string `json:"field,omitempty"`
	Message string `json:"message"`
}

func mistakesOf(found strictyaml.Errors) []mistake {
	list := make([]mistake, len(found))
	for i, e := range found {
		list[i] = mistake{e.File, e.Line, e.Column, e.Field, e.Message}
	}
	return list
}

// checked is what came of reading files that are right.
type checked struct {
	what     string // such as "3 policies"
	warnings strictyaml.Errors
}

// validate checks all files, those after one that cannot be read as well. Files for Envoy are checked together, so that a domain that
// two of them describe is found; merge lets them. Limitador's limits are written to the directory convert, if that is not empty.
func validate(w, stderr io.Writer, files []string, merge bool, convert, output string) error {
	mistakes, warnings := []mistake{}, []mistake{}
	var unread []error
	take := func(file string, right checked, err error) {
		var found strictyaml.Errors
		switch {
		case errors.As(err, &found):
			mistakes = append(mistakes, mistakesOf(found)...)
			if output == "text" {
				fmt.Fprintln(w, found)
			}
		case err != nil:
			unread = append(unread, fmt.Errorf("FILE: %w", err))
		default:
			warnings = append(warnings, mistakesOf(right.warnings)...)
			for _, e := range right.warnings {
				fmt.Fprintln(stderr, "warning:", e)
			}
			if output == "text" {
				fmt.Fprintf(w, "%s: ok, %s\n", file, right.what)
			}
		}
	}
	var forEnvoy []envoy.File
	for _, name := range files {
		if info, err := os.Stat(name); err == nil && info.IsDir() {
			list, err := envoy.ReadDir(name)
			if forEnvoy = append(forEnvoy, list...); err != nil || len(list) == 0 {
				take(name, checked{what: "no files"}, err)
			}
			continue
		}
		data, err := file.Read(name, strictyaml.MaxFile)
		switch {
		case err != nil:
			take(name, checked{}, err)
		case envoy.Looks(data):
			forEnvoy = append(forEnvoy, envoy.File{Name: name, Data: data})
		case limitador.Looks(data):
			right, err := fromLimitador(name, data, convert)
			take(name, right, err)
		default:
			set, err := policy.Parse(name, data)
			right := checked{}
			if err == nil {
				right = checked{what: fmt.Sprintf("%d policies", len(set.Policies())), warnings: set.NeedVoters()}
			}
			take(name, right, err)
		}
	}
	if len(forEnvoy) > 0 {
		config, err := envoy.Parse(forEnvoy, envoy.Options{MergeDomains: merge})
		if err != nil {
			take("", checked{}, err)
		} else {
			names := make([]string, len(forEnvoy))
			for i, f := range forEnvoy {
				names[i] = f.Name
			}
			domains, limits := config.Domains()
			take(strings.Join(names, ", "), checked{what: fmt.Sprintf("%d limits of %d domains for Envoy", limits, domains)}, nil)
		}
	}
	if output == "json" {
		ok := len(mistakes) == 0 && len(unread) == 0
		if err := json.NewEncoder(w).Encode(map[string]any{"ok": ok, "mistakes": mistakes, "warnings": warnings}); err != nil {
			return err
		}
	}
	switch {
	case len(unread) > 0:
		return errors.Join(unread...)
	case len(mistakes) > 0:
		return errNegative
	}
	return nil
}

// fromLimitador checks a file of Limitador's, and writes what it says in the format of files for Envoy to dir, if that is not empty.
func fromLimitador(name string, data []byte, dir string) (checked, error) {
	read, err := limitador.Parse(name, data)
	if err != nil {
		return checked{}, err
	}
	for i := range read.Namespaces {
		n := &read.Namespaces[i]
		text, err := n.Envoy()
		if err != nil {
			return checked{}, err
		}
		path := filepath.Join(dir, n.FileName())
		// What differs between the formats, such as two descriptors that are one there, shows here.
		if _, err := envoy.Parse([]envoy.File{{Name: path, Data: text}}, envoy.Options{}); err != nil {
			return checked{}, err
		}
		if dir == "" {
			continue
		}
		out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if err != nil {
			return checked{}, fmt.Errorf("--convert: %w", err)
		}
		_, err = out.Write(text)
		if err := errors.Join(err, out.Close()); err != nil {
			return checked{}, fmt.Errorf("--convert: %w", err)
		}
	}
	return checked{what: fmt.Sprintf("%d limits of %d namespaces of Limitador", read.Limits, len(read.Namespaces))}, nil
}

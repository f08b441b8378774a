// Package validate checks policy files, and files of other limiters, without a node, and prints every mistake with its place.
//
// It does not know the node that is to read the files: what depends on that is a warning.
package validate

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/dustin/go-humanize/english"
	"github.com/weirlimit/weir/gateway/envoy"
	"github.com/weirlimit/weir/internal/file"
	"github.com/weirlimit/weir/internal/limitador"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/policy"
)

// Options say how files are read and what is printed.
type Options struct {
	Envoy   envoy.Options // of files for Envoy
	Convert string        // directory that Limitador's limits are written to as files for Envoy; empty: nowhere
	JSON    bool          // print JSON in place of text
}

// checked is what came of reading files that are right.
type checked struct {
	what     string // such as "3 policies"
	warnings strictyaml.Errors
}

// Files checks all files, those after one that cannot be read as well. Files for Envoy are checked together, so that a domain that
// two of them describe is found; see Options. Limitador's limits are written to Options.Convert, if that is not empty. ok is false where a file has mistakes; an error is about one that cannot be read.
func Files(w, stderr io.Writer, files []string, opts Options) (ok bool, err error) {
	mistakes, warnings := strictyaml.Errors{}, strictyaml.Errors{}
	var unread []error
	take := func(file string, right checked, err error) {
		var found strictyaml.Errors
		switch {
		case errors.As(err, &found):
			mistakes = append(mistakes, found...)
			if !opts.JSON {
				fmt.Fprintln(w, found)
			}
		case err != nil:
			unread = append(unread, fmt.Errorf("FILE: %w", err))
		default:
			warnings = append(warnings, right.warnings...)
			for _, e := range right.warnings {
				fmt.Fprintln(stderr, "warning:", e)
			}
			if !opts.JSON {
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
			right, err := fromLimitador(name, data, opts.Convert)
			take(name, right, err)
		default:
			set, err := policy.Parse(name, data)
			right := checked{}
			if err == nil {
				right = checked{what: english.Plural(len(set.Policies()), "policy", ""), warnings: set.NeedVoters()}
			}
			take(name, right, err)
		}
	}
	if len(forEnvoy) > 0 {
		config, err := envoy.Parse(forEnvoy, opts.Envoy)
		if err != nil {
			take("", checked{}, err)
		} else {
			names := make([]string, len(forEnvoy))
			for i, f := range forEnvoy {
				names[i] = f.Name
			}
			domains, limits := config.Domains()
			what := english.Plural(limits, "limit", "") + " of " + english.Plural(domains, "domain", "") + " for Envoy"
			if n := config.Quotas(); n > 0 {
				what += ", " + english.Plural(n, "quota bucket", "")
			}
			take(strings.Join(names, ", "), checked{what: what}, nil)
		}
	}
	ok = len(mistakes) == 0 && len(unread) == 0
	if opts.JSON {
		if err := json.NewEncoder(w).Encode(map[string]any{"ok": ok, "mistakes": mistakes, "warnings": warnings}); err != nil {
			return false, err
		}
	}
	return ok, errors.Join(unread...)
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
			return checked{}, fmt.Errorf("convert: %w", err)
		}
		_, err = out.Write(text)
		if err := errors.Join(err, out.Close()); err != nil {
			return checked{}, fmt.Errorf("convert: %w", err)
		}
	}
	return checked{what: english.Plural(read.Limits, "limit", "") + " of " + english.Plural(len(read.Namespaces), "namespace", "") + " of Limitador"}, nil
}

package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/gateway/envoy"
	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/policy"
)

func newValidate() *cobra.Command {
	var output string
	var c checker
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
			if err := checkOutput(output); err != nil {
				return err
			}
			c.w, c.stderr, c.asJSON = cmd.OutOrStdout(), cmd.ErrOrStderr(), output == "json"
			ok, err := c.all(files)
			if err == nil && !ok {
				err = errNegative
			}
			return err
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "how to print the result: text or json")
	cmd.Flags().StringVar(&c.convert, "convert", "",
		"`DIR` to write Limitador's limits to as files for --envoy-config, one for each namespace; files that are there are not overwritten")
	cmd.Flags().BoolVar(&c.envoy.MergeDomains, "envoy-merge-domains", false,
		"let several files for Envoy describe one domain")
	return cmd
}

// checker checks files, and collects the findings of all of them.
type checker struct {
	envoy     envoy.Options // of files for Envoy
	convert   string        // directory for Limitador's limits as files for Envoy; empty: they are not written
	asJSON    bool          // print JSON in place of text
	w, stderr io.Writer

	mistakes, warnings strictyaml.Errors
	unread             []error
	forEnvoy           []envoy.File
}

// all checks all files, even if one cannot be read. It checks files for Envoy together, so that it finds a domain that
// two of them describe. ok is false if a file has mistakes; err is about files that cannot be read. Findings that
// depend on the node that will read the files are warnings.
func (c *checker) all(files []string) (ok bool, err error) {
	c.mistakes, c.warnings = strictyaml.Errors{}, strictyaml.Errors{} // for JSON, not null
	for _, name := range files {
		c.check(name)
	}
	if len(c.forEnvoy) > 0 {
		c.checkEnvoy()
	}
	ok = len(c.mistakes) == 0 && len(c.unread) == 0
	if c.asJSON {
		all := map[string]any{"ok": ok, "mistakes": c.mistakes, "warnings": c.warnings}
		if err := json.NewEncoder(c.w).Encode(all); err != nil {
			return false, err
		}
	}
	return ok, errors.Join(c.unread...)
}

// take notes and prints the findings of a file. what describes the content of a file without mistakes, such as "3
// policies".
func (c *checker) take(file, what string, warnings strictyaml.Errors, err error) {
	var found strictyaml.Errors
	switch {
	case errors.As(err, &found):
		c.mistakes = append(c.mistakes, found...)
		if !c.asJSON {
			fmt.Fprintln(c.w, found)
		}
	case err != nil:
		c.unread = append(c.unread, fmt.Errorf("FILE: %w", err))
	default:
		c.warnings = append(c.warnings, warnings...)
		for _, e := range warnings {
			fmt.Fprintln(c.stderr, "warning:", e)
		}
		if !c.asJSON {
			fmt.Fprintf(c.w, "%s: ok, %s\n", file, what)
		}
	}
}

// check checks a file, or keeps it for checkEnvoy, as it does with all files of a directory.
func (c *checker) check(name string) {
	if info, err := os.Stat(name); err == nil && info.IsDir() {
		list, err := envoy.ReadDir(name)
		if c.forEnvoy = append(c.forEnvoy, list...); err != nil || len(list) == 0 {
			c.take(name, "no files", nil, err)
		}
		return
	}
	data, err := reload.ReadFile(name, strictyaml.MaxFile)
	var what string
	var warnings strictyaml.Errors
	switch {
	case err != nil:
	case envoy.Looks(data):
		c.forEnvoy = append(c.forEnvoy, envoy.File{Name: name, Data: data})
		return
	case looksLikeLimitador(data):
		what, err = fromLimitador(name, data, c.convert)
	default:
		var set *policy.Set
		if set, err = policy.Parse(name, data); err == nil {
			what, warnings = english.Plural(len(set.Policies()), "policy", ""), set.NeedVoters()
		}
	}
	c.take(name, what, warnings, err)
}

// checkEnvoy checks all files for Envoy together.
func (c *checker) checkEnvoy() {
	config, err := envoy.Parse(c.forEnvoy, c.envoy)
	if err != nil {
		c.take("", "", nil, err)
		return
	}
	names := make([]string, len(c.forEnvoy))
	for i, f := range c.forEnvoy {
		names[i] = f.Name
	}
	domains, limits := config.Domains()
	what := english.Plural(limits, "limit", "") + " of " + english.Plural(domains, "domain", "") + " for Envoy"
	if n := config.Quotas(); n > 0 {
		what += ", " + english.Plural(n, "quota bucket", "")
	}
	c.take(strings.Join(names, ", "), what, nil, nil)
}

// fromLimitador checks a file of Limitador, and writes it in Envoy's format to dir, if that is not empty.
func fromLimitador(name string, data []byte, dir string) (what string, err error) {
	read, err := parseLimitador(name, data)
	if err != nil {
		return "", err
	}
	for i := range read.Namespaces {
		n := &read.Namespaces[i]
		text, err := n.Envoy()
		if err != nil {
			return "", err
		}
		path := filepath.Join(dir, n.FileName())
		// Parse finds limits that Envoy's format cannot tell apart, such as two descriptors that are one there.
		if _, err := envoy.Parse([]envoy.File{{Name: path, Data: text}}, envoy.Options{}); err != nil {
			return "", err
		}
		if dir == "" {
			continue
		}
		out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if err != nil {
			return "", fmt.Errorf("convert: %w", err)
		}
		_, err = out.Write(text)
		if err := errors.Join(err, out.Close()); err != nil {
			return "", fmt.Errorf("convert: %w", err)
		}
	}
	return english.Plural(read.Limits, "limit", "") + " of " + english.Plural(len(read.Namespaces), "namespace", "") +
		" of Limitador", nil
}

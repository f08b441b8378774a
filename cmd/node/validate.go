package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/policy"
)

func newValidate() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "validate FILE...",
		Short: "Check policy files: every mistake with file, line and column",
		Long: `Check policy files without a node: every mistake with file, line and column. What depends on the
node that reads the file is a warning on standard error: strict policies need one with --voters.
Exit status: 0 no mistakes, 1 mistakes, 2 a file cannot be read.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("FILE: give at least one policy file")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, files []string) error {
			if output != "text" && output != "json" {
				return fmt.Errorf("--output: %q is not one of text and json", output)
			}
			return validate(cmd.OutOrStdout(), cmd.ErrOrStderr(), files, output)
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "how to print the result: text or json")
	return cmd
}

// mistake is a policy.Error as JSON shows it.
type mistake struct {
	File    string `json:"file"`
	Line    int    `json:"line"`
	Column  int    `json:"column"`
	Field   string `json:"field,omitempty"`
	Message string `json:"message"`
}

func mistakesOf(found policy.Errors) []mistake {
	list := make([]mistake, len(found))
	for i, e := range found {
		list[i] = mistake{e.File, e.Line, e.Column, e.Field, e.Message}
	}
	return list
}

// validate checks all files, those after one that cannot be read as well.
func validate(w, stderr io.Writer, files []string, output string) error {
	mistakes, warnings := []mistake{}, []mistake{}
	var unread []error
	for _, file := range files {
		set, err := policy.Load(file)
		var found policy.Errors
		switch {
		case errors.As(err, &found):
			mistakes = append(mistakes, mistakesOf(found)...)
			if output == "text" {
				fmt.Fprintln(w, found)
			}
		case err != nil:
			unread = append(unread, fmt.Errorf("FILE: %w", err))
		default:
			strict := set.NeedVoters()
			warnings = append(warnings, mistakesOf(strict)...)
			for _, e := range strict {
				fmt.Fprintln(stderr, "warning:", e)
			}
			if output == "text" {
				fmt.Fprintf(w, "%s: ok, %d policies\n", file, len(set.Policies()))
			}
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

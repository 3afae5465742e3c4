// SPDX-License-Identifier: Apache-2.0

package labcmd

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// Labs are the laboratories of one kind.
type Labs struct {
	Default string // the name of the laboratory that is meant without flags
	Names   func() ([]string, error)
	Down    func(ctx context.Context, name string) error
	Sweep   func() error // removes what dead ones left

	// Columns are the headings of the list behind the name, and Row is what stands below
	// them for one laboratory.
	Columns []string
	Row     func(ctx context.Context, name string) ([]string, error)
}

// Texts are what the commands say of themselves.
type Texts struct {
	List string // the command list
	Down string // the command down
	Name string // the flag --name of down
	All  string // the flag --all of down
}

// Root is the root command of a tool: list, down and others. Its errors are for main to tell.
func (l Labs) Root(name, short string, t Texts, others ...*cobra.Command) *cobra.Command {
	root := &cobra.Command{Use: name, Short: short, SilenceErrors: true, SilenceUsage: true}
	root.AddCommand(l.list(t), l.down(t))
	root.AddCommand(others...)
	return root
}

// Run runs a tool's root command until it is done or the tool is interrupted.
func Run(root *cobra.Command) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return root.ExecuteContext(ctx)
}

// list prints a line for each laboratory. One that cannot be opened has the reason in its
// last column.
func (l Labs) list(t Texts) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: t.List,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			names, err := l.Names()
			if err != nil {
				return err
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "NAME\t"+strings.Join(l.Columns, "\t"))
			for _, n := range names {
				row, err := l.Row(cmd.Context(), n)
				if err != nil {
					fmt.Fprintf(w, "%s\t%s%v\n", n, strings.Repeat("-\t", len(l.Columns)-1), err)
					continue
				}
				fmt.Fprintln(w, n+"\t"+strings.Join(row, "\t"))
			}
			return w.Flush()
		},
	}
}

// down ends one laboratory, or all of this user's, and removes what dead ones left.
func (l Labs) down(t Texts) *cobra.Command {
	var name string
	var all bool
	cmd := &cobra.Command{
		Use:   "down",
		Short: t.Down,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			names := []string{name}
			if all {
				var err error
				if names, err = l.Names(); err != nil {
					return err
				}
			}
			for _, n := range names {
				if err := l.Down(cmd.Context(), n); err != nil {
					return err
				}
			}
			return l.Sweep()
		},
	}
	cmd.Flags().StringVar(&name, "name", l.Default, t.Name)
	cmd.Flags().BoolVar(&all, "all", false, t.All)
	return cmd
}
